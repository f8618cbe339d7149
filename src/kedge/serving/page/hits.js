/** One hit: its picture, label and distance, and the buttons to search with it and to remove it. */

import { icon, make } from './dom.js';
import { labelColour } from './colours.js';
import { distance } from './format.js';
import { galleryClasses, galleryFacts, itemName } from './gallery.js';
import { picture } from './pictures.js';

/** The coloured dot of a label, as on the map. */
export function labelDot(label) {
  const dot = make('span', { class: 'dot', 'aria-hidden': 'true' });
  dot.style.setProperty('--dot', labelColour(label));
  return dot;
}

/** What a picture is called first: its label or, in a gallery without any, its name. */
export const labelWords = (item) => item.label ?? (galleryClasses().length ? 'no label' : itemName(item));

/** The same as the first line of a card. */
export function labelLine(item) {
  if (!galleryClasses().length) return make('span', { class: 'hit-name' }, itemName(item));
  return make('span', { class: 'hit-line' }, labelDot(item.label),
    make('span', { class: 'hit-label' }, labelWords(item)));
}

function removeButton(hit, onRemove) {
  const name = `Remove ${itemName(hit)} from the gallery`;
  const attributes = { type: 'button', class: 'hit-remove', 'aria-label': name, title: 'Remove from the gallery' };
  const on = { click: () => onRemove(hit) };
  return make('button', { ...attributes, data: { testid: 'hit-remove' }, on }, icon('remove'));
}

/** A card for a hit; `rate` fills in what changes from search to search. */
export function hitCard(hit, { onSearch, onRemove }) {
  const label = labelWords(hit);
  const shown = make('span', { class: 'hit-distance' });
  const fill = make('span', { class: 'bar-fill' });
  const only = make('span', { class: 'only', hidden: true }, 'only here');
  const title = hit.label === null ? itemName(hit) : `${label} · ${itemName(hit)}`;
  const search = make(
    'button',
    { type: 'button', class: 'hit-search', title, data: { testid: 'hit-search' } },
    picture(hit),
    make('span', { class: 'hit-hint', 'aria-hidden': 'true' }, icon('search'), 'Find similar'),
    make(
      'span',
      { class: 'hit-words' },
      labelLine(hit),
      make('span', { class: 'hit-line' }, make('span', { class: 'bar' }, fill), shown),
      hit.name === null || hit.name === label ? null : make('span', { class: 'hit-name' }, hit.name),
    ),
  );
  search.addEventListener('click', () => onSearch({ id: hit.id, name: hit.name, label: hit.label }));
  const data = { testid: 'hit', id: hit.id, label: hit.label ?? '' };
  const card = make('article', { class: 'hit', data }, search, only);
  if (onRemove && galleryFacts()?.writable) card.append(removeButton(hit, onRemove));

  const rate = (length, largest, onlyHere) => {
    const part = largest > 0 ? length / largest : 0;
    shown.textContent = distance(length);
    fill.style.inlineSize = `${part * 100}%`;
    only.hidden = !onlyHere;
    const words = `${Math.round(part * 100)} percent of the farthest shown${onlyHere ? ', only here' : ''}`;
    search.setAttribute('aria-label', `${label}, distance ${distance(length)}, ${words}. Search with ${itemName(hit)}`);
  };
  return { card, rate };
}

/** Skeleton cards, so that nothing jumps when the first answer comes. */
export function emptyCards(number) {
  return Array.from({ length: number }, () => make('div', { class: 'hit ghost', 'aria-hidden': 'true' },
    make('span', { class: 'picture' }), make('span', { class: 'hit-words' })));
}
