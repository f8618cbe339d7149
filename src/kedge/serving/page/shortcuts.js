/** Keys that work anywhere outside of inputs and dialogs. */

import { byId } from './dom.js';

const TEXT = 'input:not([type=radio], [type=range]), textarea, select';

const typing = ({ target }) => target.closest?.(TEXT) || document.querySelector('dialog[open]');

/** `/` goes to the labels, O opens the file chooser, M changes between pictures and map. */
export function setUpShortcuts({ toMap }) {
  const keys = {
    '/': () => {
      byId('settings').open = true;
      byId('label-filter').focus();
    },
    o: () => byId('file').click(),
    m: toMap,
  };
  addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event)) return;
    const act = keys[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
}
