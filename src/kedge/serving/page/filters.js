/** The settings of a search; every change acts at once. */

import { byId, paused } from './dom.js';
import { galleryAnchors, galleryFacts } from './gallery.js';
import { plural } from './format.js';
import { state } from './state.js';

const PAUSE = 180;
const RANK_HINTS = {
  auto: 'By the predicted class; what came after training by looks.',
  class: 'As trained: the nearest class comes first.',
  looks: 'Whatever looks alike, of any class.',
};
const HINTS = {
  two_stage: 'Only the nearest lists are searched.',
  brute_force: 'Every picture of the gallery is compared.',
  both: 'Both ways side by side; hits of one alone are marked.',
};
const NAMES = { two_stage: 'Two-stage', brute_force: 'Brute force', both: 'Compare' };

const within = (number, most) => Math.min(Math.max(Math.round(number), 1), most);
const mostK = () => galleryFacts()?.limits.k ?? 200;
const mostProbes = () => Math.max(1, Math.min(galleryFacts()?.limits.probes ?? 16, galleryAnchors().length || 1));

/** Shows the settings of the state. */
export function showFilters() {
  const { rank, method, k, probes, labels } = state;
  byId('labels-field').hidden = galleryFacts()?.classes === 0;
  const isText = state.query?.text !== undefined; // compared by looks, whatever is chosen
  byId('rank-field').hidden = !galleryFacts()?.features || isText;
  document.querySelector(`input[name=rank][value=${rank}]`).checked = true;
  byId('rank-hint').textContent = RANK_HINTS[rank];
  document.querySelector(`input[name=method][value=${method}]`).checked = true;
  byId('method-hint').textContent = HINTS[method];
  byId('k-slide').max = mostK();
  byId('k').max = mostK();
  byId('k-slide').value = k;
  if (document.activeElement !== byId('k')) byId('k').value = k;
  byId('probes').max = mostProbes();
  byId('probes').value = probes;
  byId('probes-shown').textContent = probes;
  byId('probes').setAttribute('aria-valuetext', plural(Number(probes), 'list'));
  byId('probes-field').hidden = method === 'brute_force' || rank === 'looks' || isText;
  const only = labels.length ? ` · ${plural(labels.length, 'label')}` : '';
  const by = rank === 'auto' ? '' : ` · by ${rank}`;
  byId('settings-brief').textContent = `${NAMES[method]}${by} · ${k}${only}`;
}

/** Brings numbers of a shared address into what this server allows. */
export function keepWithinLimits() {
  state.k = within(state.k, mostK());
  state.probes = within(state.probes, mostProbes());
  if (!galleryFacts().features) state.rank = 'auto';
}

/** Wires the controls; `onChange` is called after the state was changed. */
export function setUpFilters(onChange) {
  const soon = paused(onChange, PAUSE);
  document.querySelectorAll('input[name=method], input[name=rank]').forEach((radio) => {
    radio.addEventListener('change', () => {
      state[radio.name] = radio.value;
      showFilters();
      onChange();
    });
  });
  const take = (name, most) => (event) => {
    if (!event.target.validity.valid || event.target.value === '') return; // half-typed
    state[name] = within(Number(event.target.value), most());
    showFilters();
    soon();
  };
  byId('k-slide').addEventListener('input', take('k', mostK));
  byId('k').addEventListener('input', take('k', mostK));
  byId('k').addEventListener('change', (event) => {
    state.k = within(Number(event.target.value) || state.k, mostK());
    event.target.value = state.k;
    showFilters();
    soon();
  });
  byId('probes').addEventListener('input', take('probes', mostProbes));
}
