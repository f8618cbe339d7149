/** The facts of the gallery. */

import { byId, make } from './dom.js';
import { count, moment, plural } from './format.js';
import { galleryAnchors, galleryFacts } from './gallery.js';
import { currentKey } from './key.js';

const trained = ({ loss }) => (loss === 'none' ? 'not trained' : loss);

function rows(facts) {
  const { record, model } = facts;
  return [
    ['Pictures', count(facts.items)],
    ['Classes', facts.classes ? count(facts.classes) : 'none'],
    ['Dimension', `${count(facts.dim)}, ${facts.precision}`],
    ...(facts.features ? [['Looks', `${count(facts.features)} features`]] : []),
    ['Model', model ? `${model.encoder}, ${trained(model)}, ${model.size} px` : 'none: vectors only'],
    ...(model ? [['Fingerprint', model.fingerprint.slice(0, 12)]] : []),
    ['Lists by', galleryAnchors().some(({ name }) => name !== null) ? facts.lists : 'k-means'],
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
