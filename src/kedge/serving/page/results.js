/** The results: one column for each method, all distances on the same scale. */

import { byId, make } from './dom.js';
import { emptyCards, hitCard, labelDot, labelWords } from './hits.js';
import { count, distance, plural, share, short, time } from './format.js';
import { galleryFacts } from './gallery.js';
import { fillGrid, moveByArrows } from './grid.js';
import { announce } from './notices.js';

const NAMES = { two_stage: 'Two-stage', brute_force: 'Brute force' };
const LISTS_SHOWN = 4;
const columns = new Map();
let acts = {};

/** `onSearch(query)` and `onRemove(hit)` act on a hit. */
export function setUpResults(given) {
  acts = given;
}

function newColumn(method) {
  const parts = {
    title: make('h3', {}, NAMES[method]),
    time: make('span', { class: 'time', data: { testid: `time-${method}` } }),
    compared: make('p', { class: 'soft' }),
    meter: make('span', { class: 'bar-fill' }),
    lists: make('p', { class: 'lists soft' }),
    grid: make('div', { class: 'grid', role: 'group', 'aria-label': `${NAMES[method]}: hits, nearest first` }),
    cards: new Map(),
  };
  moveByArrows(parts.grid);
  const head = make('header', { class: 'column-head' }, make('div', { class: 'column-line' }, parts.title, parts.time),
    make('span', { class: 'bar', 'aria-hidden': 'true' }, parts.meter), parts.compared, parts.lists);
  const data = { testid: `results-${method}`, method };
  parts.column = make('section', { class: 'column', 'aria-label': NAMES[method], data }, head, parts.grid);
  return parts;
}

function columnOf(method) {
  if (!columns.has(method)) columns.set(method, newColumn(method));
  return columns.get(method);
}

function showLists(place, { method, looked_at: lists }, rank) {
  const named = lists.filter((name) => name !== null);
  place.title = named.join(', ');
  if (rank === 'looks' || !named.length) {
    const number = method === 'brute_force' ? 'every list' : plural(lists.length, 'list');
    place.textContent = rank === 'looks' ? '' : `Looked into ${number}`;
    return;
  }
  const more = lists.length - LISTS_SHOWN;
  const names = lists.slice(0, LISTS_SHOWN).flatMap((name) => [
    make('span', { class: 'together' }, labelDot(name), name), ' ']);
  place.replaceChildren('Looked into ', ...names, more > 0 ? `and ${plural(more, 'other')}` : '');
}

/* How the hits were ranked, and why. */
function rankWords({ rank, searches: [{ looked_at: lists, hits }] }) {
  const name = lists[0] ?? (rank === 'class' ? hits[0]?.anchor : null) ?? null;
  if (rank === 'looks' && name !== null) {
    return ['Ranked by looks: ', make('span', { class: 'together' }, labelDot(name), name), ', which came after training'];
  }
  if (rank === 'looks') return ['Ranked by looks, of any class'];
  if (name === null) return ['Ranked by distance'];
  return ['Ranked by class: ', make('span', { class: 'together' }, labelDot(name), name)];
}

function showSearch(search, others, largest, rank) {
  const parts = columnOf(search.method);
  const total = galleryFacts().items;
  parts.time.textContent = time(search.seconds);
  parts.compared.textContent = `Compared with ${count(search.compared)} of ${count(total)}`;
  parts.meter.style.inlineSize = `${total ? Math.min(1, search.compared / total) * 100 : 0}%`;
  showLists(parts.lists, search, rank);

  const cards = new Map();
  for (const hit of search.hits) {
    const entry = parts.cards.get(hit.id) ?? hitCard(hit, acts); // an old card keeps its loaded picture
    entry.rate(hit.distance, largest, others !== null && !others.has(hit.id));
    cards.set(hit.id, entry);
  }
  parts.cards = cards;
  const words = 'No picture here fits. Take a label away or look into more lists.';
  const nothing = make('p', { class: 'nothing soft' }, words);
  fillGrid(parts.grid, search.hits.length ? [...cards.values()].map(({ card }) => card) : [nothing]);
  return parts.column;
}

function verdict([quick, thorough], rank) {
  if (!quick.hits.length && thorough.hits.length) return 'Two-stage found no such picture in the lists it looked into.';
  const ids = new Set(thorough.hits.map(({ id }) => id));
  const common = quick.hits.filter(({ id }) => ids.has(id)).length;
  const all = Math.max(quick.hits.length, thorough.hits.length);
  const same = common === all ? `Both found the same ${plural(all, 'picture')}.`
    : `${common} of ${all} hits in common.`;
  if (rank === 'looks') return `${same} By looks, both search all pictures.`;
  const faster = thorough.seconds / quick.seconds;
  const speed = faster >= 1 ? `was ${short(faster)} times as fast` : `took ${short(1 / faster)} times as long`;
  const part = thorough.compared ? quick.compared / thorough.compared : 0;
  return `${same} Two-stage compared with ${share(part)} of the pictures and ${speed}.`;
}

/** Shows an answer of the server. */
export function showResults(answer) {
  const { searches, rank } = answer;
  const largest = Math.max(0, ...searches.flatMap(({ hits }) => hits.map((hit) => hit.distance)));
  const ids = searches.map(({ hits }) => new Set(hits.map(({ id }) => id)));
  const shown = searches.map((search, at) => showSearch(search, searches.length > 1 ? ids[1 - at] : null, largest,
    rank));
  const place = byId('results');
  place.dataset.columns = shown.length;
  if (shown.length !== place.children.length || shown.some((column, at) => column !== place.children[at])) {
    place.replaceChildren(...shown);
  }
  byId('verdict').hidden = searches.length < 2;
  if (searches.length > 1) byId('verdict').textContent = verdict(searches, rank);
  byId('ranked').hidden = !galleryFacts().features;
  byId('ranked').replaceChildren(...(galleryFacts().features ? rankWords(answer) : []));

  const { hits } = searches.find((one) => one.hits.length) ?? searches[0];
  byId('found-title').textContent = hits.length ? plural(hits.length, 'nearest picture') : 'No pictures found';
  const nearest = hits[0] ? `, nearest: ${labelWords(hits[0])}, ${distance(hits[0].distance)}` : '';
  announce(`${plural(hits.length, 'result')}${nearest}. ${byId('ranked').textContent}`);
}

/** Before the first answer: as many empty cards as pictures were asked for. */
export function showWaiting(k) {
  if (byId('results').children.length) return;
  byId('found-title').textContent = 'Searching…';
  byId('results').dataset.columns = 1;
  byId('results').replaceChildren(make('div', { class: 'grid ghosts' }, ...emptyCards(Math.min(k, 24))));
}

/** Forgets the cards, as after the gallery has changed. */
export function forgetResults() {
  columns.clear();
  byId('results').replaceChildren();
}
