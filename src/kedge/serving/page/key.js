/** The key of a server that asks for one: from the address's fragment, or from a small form. */

import { byId, openDialog } from './dom.js';

const PLACE = 'kedge-key';
let key = null;
let asking = null;

/** The key in use, or null. */
export const currentKey = () => key;

function keep(value) {
  key = value;
  try {
    sessionStorage.setItem(PLACE, value);
  } catch {
    // kept in memory alone
  }
}

/** Moves a key from `#key=…` into this tab's storage, so that it is not shared along with the address. */
export function takeKey() {
  try {
    key = sessionStorage.getItem(PLACE) ?? key;
  } catch {
    // what is in memory stays
  }
  const given = new URLSearchParams(location.hash.slice(1)).get('key');
  if (!given) return;
  keep(given);
  history.replaceState(history.state, '', location.pathname + location.search);
}

/** Asks for a key; resolves to whether one was given. All who ask at the same time wait for the same form. */
export function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = byId('key-dialog');
    const error = byId('key-error');
    error.hidden = !refused;
    error.textContent = refused ? 'The server did not accept that key.' : '';
    byId('key').value = '';
    let given = false;
    byId('key-form').onsubmit = (event) => {
      event.preventDefault();
      given = true;
      keep(byId('key').value.trim());
      dialog.close();
    };
    dialog.addEventListener('close', () => {
      asking = null;
      resolve(given);
    }, { once: true });
    openDialog(dialog);
  });
  return asking;
}
