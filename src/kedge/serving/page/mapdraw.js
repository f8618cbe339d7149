/** Draws the map: points by class, pictures where there is room, anchors with names, the hits and the query. */

import { classColour, classShape } from './colours.js';
import { isDark } from './theme.js';

const ROOM_FOR_PICTURES = 110;
const PICTURE = 40;
const FULL_TURN = 2 * Math.PI;

const palette = () => (isDark()
  ? { ink: '#ececec', paper: '#1b1d20', query: '#ffffff', edge: '#0e0f10', hit: '#f2f3f5' }
  : { ink: '#1d1e20', paper: '#ffffff', query: '#0f1113', edge: '#ffffff', hit: '#1d1e20' });

function trace(pen, shape, x, y, r) {
  if (shape === 0) {
    pen.moveTo(x + r, y);
    pen.arc(x, y, r, 0, FULL_TURN);
  } else if (shape === 1) pen.rect(x - r * 0.88, y - r * 0.88, r * 1.76, r * 1.76);
  else {
    const turn = shape === 2 ? 4 : 3;
    const reach = shape === 2 ? r * 1.25 : r * 1.3;
    for (let corner = 0; corner < turn; corner += 1) {
      const angle = -Math.PI / 2 + (corner * FULL_TURN) / turn;
      pen[corner ? 'lineTo' : 'moveTo'](x + reach * Math.cos(angle), y + reach * Math.sin(angle));
    }
    pen.closePath();
  }
}

function inView(data, view) {
  const seen = [];
  for (let at = 0; at < data.id.length; at += 1) {
    const x = view.screenX(data.x[at]);
    const y = view.screenY(data.y[at]);
    if (x > -30 && y > -30 && x < view.width + 30 && y < view.height + 30) seen.push({ at, x, y });
  }
  return seen;
}

function drawPoints(pen, map, view, seen, look) {
  const radius = Math.min(2.6 * Math.sqrt(view.zoom), 7) * (map.data.id.length > 1500 ? 1 : 1.3);
  const byClass = new Map();
  for (const point of seen) {
    const group = map.data.label[point.at];
    if (!byClass.has(group)) byClass.set(group, []);
    byClass.get(group).push(point);
  }
  for (const [group, points] of byClass) {
    const shape = classShape(group, map.classes.length);
    pen.globalAlpha = look.highlight === null ? 0.82 : look.highlight === group ? 0.95 : 0.1;
    pen.fillStyle = classColour(group, map.classes.length);
    pen.beginPath();
    points.forEach(({ x, y }) => trace(pen, shape, x, y, radius));
    pen.fill();
  }
  pen.globalAlpha = 1;
  return radius;
}

function drawPictures(pen, map, seen, look) {
  for (const { at, x, y } of seen) {
    const image = look.pictureOf(map.data.id[at]);
    if (!image) continue;
    const group = map.data.label[at];
    pen.globalAlpha = look.highlight === null || look.highlight === group ? 1 : 0.2;
    pen.save();
    pen.beginPath();
    pen.roundRect(x - PICTURE / 2, y - PICTURE / 2, PICTURE, PICTURE, 7);
    pen.lineWidth = 5;
    pen.strokeStyle = classColour(group, map.classes.length);
    pen.stroke();
    pen.clip();
    pen.drawImage(image, x - PICTURE / 2, y - PICTURE / 2, PICTURE, PICTURE);
    pen.restore();
  }
  pen.globalAlpha = 1;
}

/* About a point a circle, about a picture a frame. */
function ring(pen, { x, y }, radius, close, colours, thick) {
  const half = PICTURE / 2 + radius;
  pen.beginPath();
  if (close) pen.roundRect(x - half, y - half, 2 * half, 2 * half, 10);
  else pen.arc(x, y, radius, 0, FULL_TURN);
  pen.lineWidth = thick + 2.5;
  pen.strokeStyle = colours.edge;
  pen.stroke();
  pen.lineWidth = thick;
  pen.strokeStyle = colours.hit;
  pen.stroke();
}

/* A diamond with a hole: no point of a class looks like it. */
function drawAnchor(pen, x, y, colour, colours) {
  pen.beginPath();
  trace(pen, 2, x, y, 7);
  pen.fillStyle = colours.paper;
  pen.fill();
  pen.lineWidth = 5;
  pen.strokeStyle = colours.edge;
  pen.stroke();
  pen.lineWidth = 2.6;
  pen.strokeStyle = colour;
  pen.stroke();
  pen.beginPath();
  pen.arc(x, y, 2, 0, FULL_TURN);
  pen.fillStyle = colour;
  pen.fill();
}

const apart = (one, other) => one.right < other.left || other.right < one.left || one.low < other.high
  || other.low < one.high;

/** The corner below right that the buttons cover (.map-tools in style.css), in pixels. */
const TOOLS = { width: 62, height: 170 };

function drawNames(pen, names, taken, colours, view) {
  pen.font = '600 12px system-ui, sans-serif';
  pen.textBaseline = 'middle';
  pen.lineJoin = 'round';
  for (const { text, x, y } of names) {
    const wide = pen.measureText(text).width;
    const edge = view.width - (y > view.height - TOOLS.height ? TOOLS.width : 4);
    const left = x + 13 + wide < edge ? x + 13 : x - 13 - wide;
    const box = { left: left - 3, right: left + wide + 3, high: y - 9, low: y + 9 };
    if (!taken.every((other) => apart(box, other))) continue;
    taken.push(box);
    pen.lineWidth = 4;
    pen.strokeStyle = colours.paper;
    pen.strokeText(text, left, y);
    pen.fillStyle = colours.ink;
    pen.fillText(text, left, y);
  }
}

function drawAnchors(pen, map, view, look, colours) {
  const shown = map.anchors
    .map((anchor) => ({ ...anchor, group: map.classes.indexOf(anchor.name), at: look.nearest.indexOf(anchor.anchor) }))
    .map((anchor) => ({ ...anchor, x: view.screenX(anchor.x), y: view.screenY(anchor.y) }))
    .filter(({ x, y }) => x > -10 && y > -10 && x < view.width + 10 && y < view.height + 10);
  const rank = ({ group, at }) => (group === look.highlight ? -1 : at >= 0 ? at : 99);
  const ordered = [...shown].sort((one, other) => rank(one) - rank(other));
  for (const { x, y, group } of [...ordered].reverse()) {
    pen.globalAlpha = look.highlight === null || look.highlight === group ? 1 : 0.35;
    drawAnchor(pen, x, y, classColour(group, map.classes.length), colours);
  }
  pen.globalAlpha = 1;
  const named = ordered.filter(({ name, group }) => name && (look.highlight === null || look.highlight === group));
  const taken = shown.map(({ x, y }) => ({ left: x - 8, right: x + 8, high: y - 8, low: y + 8 }));
  drawNames(pen, named.map(({ name, x, y }) => ({ text: name, x, y })), taken, colours, view);
}

/* A cross in a ring, as on a chart: the place where the query lies. */
function drawQuery(pen, [x, y], view, colours) {
  const atX = view.screenX(x);
  const atY = view.screenY(y);
  for (const [colour, thick] of [[colours.edge, 6.5], [colours.query, 3]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    pen.lineCap = 'round';
    pen.beginPath();
    pen.arc(atX, atY, 11, 0, FULL_TURN);
    for (const [right, down] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
      pen.moveTo(atX + right * 7, atY + down * 7);
      pen.lineTo(atX + right * 18, atY + down * 18);
    }
    pen.stroke();
  }
}

/** Draws all of it. look: {highlight, hits: Set of ids, place, nearest, aim, pictureOf(id)} */
export function drawMap(pen, map, view, look) {
  const colours = palette();
  pen.clearRect(0, 0, view.width, view.height);
  const seen = inView(map.data, view);
  const close = view.zoom > 1.5 && seen.length <= ROOM_FOR_PICTURES;
  const radius = drawPoints(pen, map, view, seen, look);
  if (close) drawPictures(pen, map, seen, look);
  const marked = close ? 4 : radius + 2.5;
  seen.filter(({ at }) => look.hits.has(map.data.id[at])).forEach((hit) => ring(pen, hit, marked, close, colours, 2));
  drawAnchors(pen, map, view, look, colours);
  if (look.place) drawQuery(pen, look.place, view, colours);
  const aim = seen.find(({ at }) => at === look.aim);
  if (aim) ring(pen, aim, marked + 2, close, colours, 3);
}
