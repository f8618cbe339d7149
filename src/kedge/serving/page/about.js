/** The facts of the gallery. */

import { byId, make } from './dom.js';
import { count, moment, plural } from './format.js';
import { galleryFacts } from './gallery.js';
import { currentKey } from './key.js';

function rows(facts) {
  const { record, model } = facts;
  return [
    ['Pictures', count(facts.items)],
    ['Classes', count(facts.classes)],
    ['Dimension', `${count(facts.dim)}, ${facts.precision}`],
    ['Model', model ? `${model.encoder}, ${model.loss}, ${model.size} px` : 'none: vectors only'],
    ...(model ? [['Fingerprint', model.fingerprint.slice(0, 12)]] : []),
    ['Lists by', facts.lists],
    ['Version', `${count(record.version)} (${plural(record.versions, 'version')} kept)`],
    ['Changed', moment(record.changed)],
    ['Unknowns', facts.calibrated ? 'recognised' : 'not calibrated'],
    ['Writing', facts.writable ? 'allowed' : 'off'],
  ];
}

/** Shows the facts in the panel, the header and the page's title. */
export function showFacts() {
  const facts = galleryFacts();
  byId('facts').replaceChildren(...rows(facts).map(([name, value]) => make('div', {}, make('dt', {}, name),
    make('dd', { title: name === 'Fingerprint' ? facts.model.fingerprint : null }, value))));
  byId('gallery-name').textContent = facts.name;
  byId('gallery-size').textContent = plural(facts.items, 'picture');
  byId('kedge-version').textContent = `Kedge ${facts.version}`;
  byId('api-link').hidden = currentKey() !== null; // a plain link cannot send the key
  byId('add-open').hidden = !facts.writable;
  document.title = `${facts.name} · Kedge`;
}
