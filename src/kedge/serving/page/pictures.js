/** Thumbnails of the gallery's pictures, with or without a key. */

import * as api from './api.js';
import { make } from './dom.js';
import { currentKey } from './key.js';

const AT_ONCE = 6;
const KEPT = 600;
const fetched = new Map();
const waiting = [];
let running = 0;

function next() {
  if (running >= AT_ONCE || !waiting.length) return;
  running += 1;
  const { id, done, failed } = waiting.shift();
  api.thumbnail(id)
    .then((blob) => done(URL.createObjectURL(blob)), failed)
    .finally(() => {
      running -= 1;
      next();
    });
}

function forgetOldest() {
  const [id, address] = fetched.entries().next().value;
  fetched.delete(id);
  address.then(URL.revokeObjectURL, () => {});
}

/** The address to show an item's thumbnail from; with a key its bytes are fetched first. */
export async function pictureAddress(id) {
  if (!currentKey()) return api.thumbnailAddress(id);
  if (!fetched.has(id)) {
    if (fetched.size >= KEPT) forgetOldest();
    const coming = new Promise((done, failed) => waiting.push({ id, done, failed }));
    coming.catch(() => fetched.delete(id)); // so that it is asked for again
    fetched.set(id, coming);
    next();
  }
  return fetched.get(id);
}

/** A square with the item's thumbnail, or with the first letter of its label where no picture is kept. */
export function picture({ id, label }) {
  const image = make('img', { alt: '', decoding: 'async', draggable: 'false' });
  const square = make('span', { class: 'picture', data: { initial: (label ?? '?').slice(0, 1).toUpperCase() } }, image);
  const none = () => square.classList.add('none');
  image.addEventListener('error', none);
  pictureAddress(id).then((address) => {
    image.src = address;
  }, none);
  return square;
}
