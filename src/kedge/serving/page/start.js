/** Before the first query: pictures of the gallery's own to start from. */

import * as api from './api.js';
import { byId, make } from './dom.js';
import { galleryAnchors, itemName } from './gallery.js';
import { fillGrid, moveByArrows } from './grid.js';
import { emptyCards, labelLine } from './hits.js';
import { picture } from './pictures.js';

const SHOWN = 12;
const DEPTH = 8;
const IN_FAN = 3;
let loaded = false;

const shuffled = (list) => list
  .map((entry) => [Math.random(), entry])
  .sort(([one], [other]) => one - other)
  .map(([, entry]) => entry);

/* A few typical pictures of each of some anchors, one of every anchor before the second of any. */
async function typicalOnes() {
  const chosen = shuffled(galleryAnchors().filter(({ items }) => items > 0)).slice(0, SHOWN);
  const answers = await Promise.all(chosen.map(({ anchor }) => api.anchor(anchor, DEPTH)));
  const piles = answers.map(({ typical }) => shuffled(typical));
  const found = [];
  for (let layer = 0; layer < DEPTH; layer += 1) {
    found.push(...piles.map((pile) => pile[layer]).filter(Boolean));
  }
  return found.slice(0, SHOWN);
}

async function startingItems() {
  const typical = await typicalOnes().catch(() => []);
  return typical.length ? typical : (await api.items(SHOWN)).items;
}

function card(item, onSearch) {
  const { id, name } = item;
  const attributes = { type: 'button', class: 'hit-search', title: itemName(item), data: { testid: 'starter' } };
  attributes['aria-label'] = `Search with ${itemName(item)}${item.label === null ? '' : `, ${item.label}`}`;
  return make('article', { class: 'hit', data: { id } }, make(
    'button',
    { ...attributes, on: { click: () => onSearch({ id, name, label: item.label }) } },
    picture(item),
    make('span', { class: 'hit-words' }, labelLine(item)),
  ));
}

/** Loads the starting pictures once, or anew. */
export async function showStarters(onSearch, anew = false) {
  if (loaded && !anew) return;
  const grid = byId('starters');
  if (!loaded) fillGrid(grid, emptyCards(SHOWN));
  loaded = true;
  try {
    const items = await startingItems();
    fillGrid(grid, items.length ? items.map((item) => card(item, onSearch))
      : [make('p', { class: 'nothing soft' }, 'The gallery is still empty.')]);
    byId('fan').replaceChildren(...items.slice(0, IN_FAN).map(picture));
  } catch (error) {
    loaded = false;
    fillGrid(grid, []);
    throw error;
  }
}

/** Lets the arrow keys move among them. */
export const setUpStarters = () => moveByArrows(byId('starters'));
