/** The bar that shows what is searched with. */

import { byId, make } from './dom.js';
import { time } from './format.js';
import { galleryFacts, itemName } from './gallery.js';
import { labelDot } from './hits.js';
import { picture } from './pictures.js';
import { sameQuery } from './state.js';

let shown = null;
let address = null;

function ownPicture({ blob }) {
  if (address) URL.revokeObjectURL(address);
  address = URL.createObjectURL(blob);
  const image = make('img', { src: address, alt: 'Your picture' });
  const square = make('span', { class: 'picture whole', data: { initial: '?' } }, image);
  image.addEventListener('error', () => square.classList.add('none')); // a format that the browser cannot show
  return square;
}

const ownText = () => make('span', { class: 'picture none', data: { initial: 'Aa' } });

function describe(title, ...text) {
  byId('asked-title').textContent = title;
  byId('asked-text').replaceChildren(...text);
}

/** Shows the query, or the invitation where there is none. */
export function showQuery(query) {
  byId('page').dataset.asked = query !== null;
  byId('hero').hidden = query !== null;
  byId('asked').hidden = query === null;
  if (query && !sameQuery(query, shown)) {
    const isText = query.text !== undefined;
    byId('query-picture').replaceChildren(isText ? ownText() : query.blob ? ownPicture(query) : picture(query));
    if (isText) describe(query.text, 'Your text');
    else if (query.blob) describe(query.name || 'Your picture', 'Your picture');
    else if (query.name === undefined) describe('\u00a0', 'From the gallery'); // its name is on the way
  }
  byId('describe').hidden = !galleryFacts()?.text;
  if (document.activeElement !== byId('text')) byId('text').value = query?.text ?? '';
  byId('add').hidden = !(query?.blob && galleryFacts()?.writable);
  shown = query;
}

/** Names the item that is searched with. */
export function showItem(query, item) {
  if (!sameQuery(query, shown)) return;
  const label = item.label && [' · ', make('span', { class: 'together' }, labelDot(item.label), item.label)];
  describe(itemName(item), 'From the gallery', ...(label ?? []));
}

/** Says how long the encoder took for the reader's picture or text. */
export function showEncoding(query, seconds) {
  if (query.id !== undefined) return;
  byId('asked-text').textContent = `Your ${query.blob ? 'picture' : 'text'} · encoded in ${time(seconds.encoder)}`;
}

/** A gallery without a model cannot be searched with pictures from outside. */
export function showWithoutModel() {
  byId('query-title').textContent = 'Find similar pictures';
  byId('hero').classList.add('plain'); // nothing can be dropped here
  byId('hero-text').textContent = 'This gallery holds vectors without their model: start from one of its own pictures.';
  document.querySelectorAll('[data-pick]').forEach((button) => button.remove());
}
