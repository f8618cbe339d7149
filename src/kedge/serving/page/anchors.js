/** The anchors nearest to the query, and a look at what is typical of one. */

import * as api from './api.js';
import { byId, make, openDialog } from './dom.js';
import { distance, plural } from './format.js';
import { fillGrid, moveByArrows } from './grid.js';
import { emptyCards, hitCard, labelDot } from './hits.js';
import { showError } from './notices.js';

const TYPICAL = 12;
let search = () => {};
let opened = 0;

function chip(near) {
  const label = `${near.name}, distance ${distance(near.distance)}. Show its typical pictures`;
  const attributes = { type: 'button', class: 'chip', 'aria-label': label, data: { testid: 'anchor-chip' } };
  return make('li', {}, make('button', { ...attributes, on: { click: () => openAnchor(near) } },
    labelDot(near.name), near.name, make('span', { class: 'chip-number' }, distance(near.distance))));
}

/** Shows the nearest anchors, nearest first; lists without a class have none. */
export function showAnchors(nearest) {
  const named = nearest.filter(({ name }) => name !== null);
  byId('anchors').hidden = named.length === 0;
  byId('anchor-chips').replaceChildren(...named.map(chip));
}

/** Opens the panel with the typical pictures of an anchor. */
export async function openAnchor(near) {
  const dialog = byId('anchor-dialog');
  const grid = byId('anchor-grid');
  const turn = (opened += 1);
  byId('anchor-title').replaceChildren(labelDot(near.name), near.name);
  byId('anchor-text').textContent = 'The pictures nearest to this anchor.';
  fillGrid(grid, emptyCards(TYPICAL));
  openDialog(dialog);
  try {
    const { items, typical } = await api.anchor(near.anchor, TYPICAL);
    if (turn !== opened) return;
    const largest = Math.max(0, ...typical.map((hit) => hit.distance));
    const onSearch = (query) => {
      dialog.close();
      search(query);
    };
    const cards = typical.map((hit) => {
      const { card, rate } = hitCard(hit, { onSearch });
      rate(hit.distance, largest, false);
      return card;
    });
    byId('anchor-text').textContent = `${plural(items, 'picture')} in its list; these are the nearest to the anchor.`;
    fillGrid(grid, cards);
  } catch (error) {
    if (turn !== opened) return;
    dialog.close();
    showError(error, () => openAnchor(near));
  }
}

/** `onSearch(query)` is called for a picture that was clicked. */
export function setUpAnchors(onSearch) {
  search = onSearch;
  moveByArrows(byId('anchor-grid'));
}
