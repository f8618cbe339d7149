/** The map view: the gallery in two dimensions. */

import * as api from './api.js';
import { byId, make } from './dom.js';
import { labelDot, labelWords } from './hits.js';
import { drawMap } from './mapdraw.js';
import { describeMap, showLegend, showPinned } from './maplegend.js';
import { moveMap } from './mapmove.js';
import { MapView } from './mapview.js';
import { announce, showError } from './notices.js';
import { picture, pictureAddress } from './pictures.js';
import { onTheme } from './theme.js';

const REACH = 14;
const REACH_OF_A_FINGER = 26;
const view = new MapView();
const look = { highlight: null, hits: new Set(), place: null, nearest: [], nearestName: null, aim: null, pictureOf };
const images = new Map();
let map = null;
let loading = null;
let pinned = null;
let frame = 0;
let search = () => {};
let drawn = () => {};

/* Pictures come when they are first looked for; the map is drawn again once they are there. */
function pictureOf(id) {
  if (!images.has(id)) {
    images.set(id, null);
    const image = new Image();
    image.onload = () => {
      images.set(id, image);
      redraw();
    };
    pictureAddress(id).then((address) => {
      image.src = address;
    }, () => {});
  }
  return images.get(id);
}

function draw() {
  frame = 0;
  const canvas = byId('map');
  const { width, height } = canvas.getBoundingClientRect();
  if (!map || width === 0) return;
  const dots = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * dots) || canvas.height !== Math.round(height * dots)) {
    canvas.width = Math.round(width * dots);
    canvas.height = Math.round(height * dots);
  }
  view.width = width;
  view.height = height;
  const pen = canvas.getContext('2d');
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  drawMap(pen, map, view, look);
  canvas.dataset.ready = 'true';
  canvas.dataset.query = String(look.place !== null);
}

function redraw() {
  frame ||= requestAnimationFrame(draw);
}

function nearestPoint(x, y, reach) {
  let best = null;
  let least = reach * reach;
  for (let at = 0; at < map.data.id.length; at += 1) {
    const apart = (view.screenX(map.data.x[at]) - x) ** 2 + (view.screenY(map.data.y[at]) - y) ** 2;
    if (apart < least) [best, least] = [at, apart];
  }
  return best;
}

function describePoint(at) {
  const group = map.data.label[at];
  return { id: map.data.id[at], label: group < 0 ? null : map.classes[group] };
}

function showTip(at) {
  const tip = byId('map-tip');
  if (at === look.aim && !tip.hidden) return;
  const item = describePoint(at);
  const label = labelWords(item);
  tip.replaceChildren(picture(item), make('span', {}, item.label && labelDot(item.label), label));
  tip.setAttribute('aria-label', `Search with picture ${item.id}, ${label}`);
  tip.dataset.id = item.id;
  tip.hidden = false;
  const x = view.screenX(map.data.x[at]);
  const y = view.screenY(map.data.y[at]);
  const { offsetWidth: wide, offsetHeight: tall } = tip;
  tip.style.left = `${Math.min(Math.max(x - wide / 2, 6), view.width - wide - 6)}px`;
  tip.style.top = `${y - tall - 16 > 6 ? y - tall - 16 : Math.min(y + 16, view.height - tall - 6)}px`;
  look.aim = at;
  redraw();
}

function hideTip() {
  byId('map-tip').hidden = true;
  if (look.aim === null) return;
  look.aim = null;
  redraw();
}

function pickAt(at) {
  hideTip();
  search({ id: map.data.id[at] });
}

const acts = {
  redraw,
  leave: hideTip,
  hover(x, y) {
    if (!map) return;
    const at = nearestPoint(x, y, REACH);
    byId('map').dataset.over = at !== null;
    if (at === null) hideTip();
    else showTip(at);
  },
  pick(x, y, touch) {
    if (!map) return;
    const at = nearestPoint(x, y, touch ? REACH_OF_A_FINGER : REACH);
    if (at === null) hideTip();
    else if (touch && at !== look.aim) showTip(at);
    else pickAt(at);
  },
  aim() {
    if (!map) return;
    const at = nearestPoint(view.width / 2, view.height / 2, Infinity);
    if (at === null) return;
    showTip(at);
    announce(`${labelWords(describePoint(at))}, picture ${map.data.id[at]}`);
  },
  choose() {
    if (look.aim === null) acts.aim();
    else pickAt(look.aim);
  },
};

function highlight(group) {
  look.highlight = group ?? pinned;
  redraw();
}

function pin(group) {
  pinned = pinned === group ? null : group;
  showPinned(pinned);
  highlight(pinned);
}

async function load() {
  byId('map-wait').hidden = false;
  const answer = await api.map();
  const anchors = answer.anchors.filter(({ name }) => name !== null); // lists without a class are nobody's anchors
  map = { classes: answer.classes, anchors, data: answer.items, total: answer.total };
  view.fit([...map.data.x, ...map.anchors.map(({ x }) => x)], [...map.data.y, ...map.anchors.map(({ y }) => y)]);
  pinned = null;
  look.highlight = null;
  showLegend(map, { onHighlight: highlight, onPin: pin });
  describeMap(map, look);
  byId('map-wait').hidden = true;
  drawn();
}

/** Shows the map, loading it first where that has not been done. */
export async function showMap() {
  loading ??= load();
  try {
    await loading;
    redraw();
  } catch (error) {
    loading = null;
    byId('map-wait').hidden = true;
    showError(error, showMap);
  }
}

/** Places the query and rings its hits; null takes them away. */
export function placeOnMap(answer) {
  look.hits = new Set(answer?.searches.flatMap(({ hits }) => hits.map(({ id }) => id)) ?? []);
  look.place = answer?.place ?? null;
  look.nearest = answer?.nearest.map(({ anchor }) => anchor) ?? [];
  look.nearestName = answer?.nearest[0]?.name ?? null;
  if (map) describeMap(map, look);
  redraw();
}

/** Forgets the points, as after the gallery has changed. */
export function forgetMap() {
  map = null;
  loading = null;
  look.aim = null;
  byId('map-tip').hidden = true;
}

/** `onSearch(query)` is called for a point that was clicked, `onDrawn()` once the server has drawn the map. */
export function setUpMap(onSearch, onDrawn) {
  search = onSearch;
  drawn = onDrawn;
  moveMap(byId('map'), view, acts);
  const change = (act) => () => {
    act();
    hideTip();
    redraw();
  };
  byId('map-in').addEventListener('click', change(() => view.zoomBy(1.6)));
  byId('map-out').addEventListener('click', change(() => view.zoomBy(1 / 1.6)));
  byId('map-reset').addEventListener('click', change(() => view.reset()));
  byId('map-tip').addEventListener('mousedown', (event) => event.preventDefault()); // else the canvas loses the focus
  byId('map-tip').addEventListener('click', (event) => {
    hideTip();
    onSearch({ id: Number(event.currentTarget.dataset.id) });
  });
  new ResizeObserver(redraw).observe(byId('map'));
  onTheme(redraw);
}
