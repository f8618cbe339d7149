/** The map's legend, and the map in words. */

import { byId, make } from './dom.js';
import { classShape } from './colours.js';
import { count, plural } from './format.js';
import { labelDot } from './hits.js';

function perClass(map) {
  const numbers = map.classes.map(() => 0);
  map.data.label.forEach((group) => {
    if (group >= 0) numbers[group] += 1;
  });
  return numbers;
}

function neighbour(anchors, own) {
  const apart = (other) => Math.hypot(other.x - own.x, other.y - own.y);
  const others = anchors.filter((other) => other !== own && other.name);
  return others.length ? others.reduce((one, other) => (apart(other) < apart(one) ? other : one)).name : '–';
}

/** Fills the legend; `onHighlight(index | null)` follows the pointer and the focus, `onPin(index)` a click. */
export function showLegend(map, { onHighlight, onPin }) {
  const numbers = perClass(map);
  byId('legend-card').hidden = map.classes.length === 0;
  byId('legend').replaceChildren(...map.classes.map((name, index) => {
    const dot = labelDot(name);
    dot.dataset.shape = classShape(index, map.classes.length);
    const on = {
      click: () => onPin(index),
      pointerenter: () => onHighlight(index),
      pointerleave: () => onHighlight(null),
      focus: () => onHighlight(index),
      blur: () => onHighlight(null),
    };
    return make('li', {}, make('button', { type: 'button', 'aria-pressed': 'false', data: { label: name }, on },
      dot, make('span', { class: 'option-name' }, name), make('span', { class: 'soft' }, count(numbers[index]))));
  }));
}

/** Marks the class that stays highlighted. */
export function showPinned(pinned) {
  byId('legend').querySelectorAll('button').forEach((button, index) => {
    button.setAttribute('aria-pressed', String(index === pinned));
  });
}

/** Says in words and as a table what the map shows. */
export function describeMap(map, { hits, place, nearestName }) {
  const numbers = perClass(map);
  const groupOf = new Map(map.data.id.map((id, at) => [id, map.data.label[at]]));
  const hitsIn = map.classes.map(() => 0);
  hits.forEach((id) => {
    if (groupOf.get(id) >= 0) hitsIn[groupOf.get(id)] += 1;
  });
  const shown = map.data.id.length;
  const all = shown < map.total ? `${count(shown)} of ${plural(map.total, 'picture')}` : plural(shown, 'picture');
  const query = place ? ` The query is the ringed cross${nearestName ? `, nearest to ${nearestName}` : ''}.` : '';
  const classes = map.classes.length ? ` in ${plural(map.classes.length, 'class', 'classes')}` : '';
  const ringed = hits.size ? ' Its hits are ringed.' : '';
  byId('map-summary').textContent =
    `${all}${classes}${map.anchors.length ? '; diamonds are anchors' : ''}.${query}${ringed}`;
  byId('map-text').hidden = map.classes.length === 0;
  byId('map-table').replaceChildren(...map.classes.map((name, index) => {
    const own = map.anchors.find((anchor) => anchor.name === name);
    return make('tr', {}, make('th', { scope: 'row' }, name), make('td', {}, count(numbers[index])),
      make('td', {}, count(hitsIn[index])), make('td', {}, own ? neighbour(map.anchors, own) : '–'));
  }));
}
