/** What the page says: one error where the eye is, messages that pass, and words for screen readers. */

import { byId, icon, make } from './dom.js';

const SHOWN_FOR = 6000;
let timer;

/** Shows an error's sentence in `place`, with a button where trying again may help. */
export function showError(error, again = null, place = byId('error')) {
  const retry = again && error.again ? make('button', { type: 'button', class: 'button small' }, 'Try again') : null;
  retry?.addEventListener('click', () => {
    hideError(place);
    again();
  });
  const words = error.status === undefined ? 'The page could not show the answer.' : error.message;
  place.replaceChildren(icon('alert'), make('p', {}, words), ...(retry ? [retry] : []));
  place.hidden = false;
}

/** Takes the error away. */
export function hideError(place = byId('error')) {
  place.hidden = true;
  place.replaceChildren();
}

/** Says in passing what happened. */
export function say(text) {
  const place = byId('message');
  place.replaceChildren(make('p', {}, text));
  place.dataset.shown = 'true';
  clearTimeout(timer);
  timer = setTimeout(() => delete place.dataset.shown, SHOWN_FOR);
}

/** Tells screen readers alone. */
export function announce(text) {
  byId('announced').textContent = text;
}
