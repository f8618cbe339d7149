/** The calls of Kedge's HTTP API, version 1. */

import { askForKey, currentKey } from './key.js';

const ROOT = '/api/v1';
const TRIES_WHEN_BUSY = 3;
const LONGEST_WAIT = 30;
let tellBusy = () => {};

/** A call that failed, with one plain sentence; `again` says whether the same call may work later. */
export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
    this.again = status === 0 || status === 401 || status === 408 || status === 429 || status >= 500;
  }
}

/** Calls `tell(seconds)` while a busy server is waited for. */
export function onBusy(tell) {
  tellBusy = tell;
}

/** Whether this failure only means that a newer question replaced the one asked. */
export const isStale = (error) => error.name === 'AbortError';

const OWN_WORDS = {
  401: 'This gallery needs a key.',
  404: 'The server does not know what was asked for.',
  413: 'The picture is too large for this server.',
  415: 'The file is not a picture that the server can read.',
  429: 'The server is busy. Please try again in a moment.',
  503: 'The server is not ready yet. Please try again in a moment.',
};

async function sentence(answer) {
  try {
    const { error } = await answer.json();
    if (typeof error === 'string' && error) return error;
  } catch {
    // not JSON: a proxy's page, perhaps
  }
  return OWN_WORDS[answer.status] ?? `The server answered with an error (${answer.status}).`;
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener('abort', () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

async function send(path, { method = 'GET', body, signal }) {
  const headers = {};
  if (currentKey()) headers.Authorization = `Bearer ${currentKey()}`;
  if (body) headers['Content-Type'] = body.type.startsWith('image/') ? body.type : 'application/octet-stream';
  try {
    return await fetch(ROOT + path, { method, headers, body, signal });
  } catch (error) {
    if (isStale(error)) throw error;
    const words = navigator.onLine ? 'The server cannot be reached. Is it still running?' : 'You are offline.';
    throw new Refused(0, words);
  }
}

async function call(path, options = {}) {
  for (let tries = 0; ;) {
    const key = currentKey();
    const answer = await send(path, options);
    if (answer.ok) return answer;
    if (answer.status === 401 && (key !== currentKey() || (await askForKey(key !== null)))) continue;
    if (answer.status === 429 && tries < TRIES_WHEN_BUSY) {
      tries += 1;
      const wait = Math.min(Number(answer.headers.get('Retry-After')) || 1, LONGEST_WAIT);
      tellBusy(wait);
      await sleep(wait, options.signal);
      continue;
    }
    throw new Refused(answer.status, await sentence(answer));
  }
}

const json = async (path, options) => (await call(path, options)).json();

export const info = () => json('/info');
export const classes = () => json('/classes');
export const anchors = () => json('/anchors');
export const anchor = (index, k) => json(`/anchors/${index}?k=${k}`);
export const items = (limit) => json(`/items?limit=${limit}`);
export const item = (id) => json(`/items/${id}`);
export const map = () => json('/map?limit=4000');
export const remove = (id) => call(`/items/${id}`, { method: 'DELETE' });

/** Where the thumbnail of an item lies. */
export const thumbnailAddress = (id) => `${ROOT}/items/${id}/thumbnail`;

/** The thumbnail's bytes, for a server with a key: an <img> cannot send one. */
export const thumbnail = async (id) => (await call(`/items/${id}/thumbnail`)).blob();

/** Searches with a picture of the gallery ({id}), with one of the reader's own ({blob}) or with a {text}. */
export function search({ id, blob, text }, { k, rank, method, probes, labels }, signal) {
  const asked = new URLSearchParams({ k, rank, method, probes });
  labels.forEach((label) => asked.append('label', label));
  if (text !== undefined) {
    asked.set('text', text);
    return json(`/search?${asked}`, { signal });
  }
  if (blob) return json(`/search?${asked}`, { method: 'POST', body: blob, signal });
  return json(`/items/${id}/similar?${asked}`, { signal });
}

/** Adds a picture; an empty label or name stands for none. */
export function add(blob, label, name) {
  const asked = new URLSearchParams(Object.entries({ label, name }).filter(([, value]) => value));
  return json(`/items?${asked}`, { method: 'POST', body: blob });
}
