/** The label filter: a text input with a list to choose several labels from, and the chosen ones as chips. */

import { byId, icon, make } from './dom.js';
import { count } from './format.js';
import { galleryClasses } from './gallery.js';
import { labelDot } from './hits.js';
import { state } from './state.js';

const SHOWN = 200;
let changed = () => {};
let active = -1;

const input = () => byId('label-filter');
const list = () => byId('label-list');
const options = () => [...list().querySelectorAll('[role=option]')];

function fitting() {
  const text = input().value.trim().toLowerCase();
  const starts = ({ name }) => (name.toLowerCase().startsWith(text) ? 0 : 1);
  return galleryClasses()
    .filter(({ name }) => name.toLowerCase().includes(text))
    .sort((one, other) => starts(one) - starts(other));
}

function setActive(at) {
  const all = options();
  active = all.length ? (at + all.length) % all.length : -1;
  all.forEach((option, index) => option.classList.toggle('active', index === active));
  if (active < 0) input().removeAttribute('aria-activedescendant');
  else {
    input().setAttribute('aria-activedescendant', all[active].id);
    all[active].scrollIntoView({ block: 'nearest' });
  }
}

function fill() {
  const chosen = new Set(state.labels);
  const all = fitting();
  const rows = all.slice(0, SHOWN).map(({ name, items }, index) => make(
    'li',
    {
      role: 'option',
      id: `label-option-${index}`,
      'aria-selected': String(chosen.has(name)),
      data: { testid: 'label-option', label: name },
      on: { click: () => toggle(name) },
    },
    labelDot(name),
    make('span', { class: 'option-name' }, name),
    make('span', { class: 'soft' }, count(items)),
  ));
  const note = (text) => make('li', { class: 'soft none', role: 'option', 'aria-disabled': 'true' }, text);
  if (!rows.length) rows.push(note('No such label'));
  else if (all.length > SHOWN) rows.push(note(`${count(all.length - SHOWN)} more: type a part of the name`));
  list().replaceChildren(...rows);
}

function open() {
  if (list().hidden) {
    list().hidden = false;
    input().setAttribute('aria-expanded', 'true');
  }
  fill();
}

function close() {
  list().hidden = true;
  active = -1;
  input().setAttribute('aria-expanded', 'false');
  input().removeAttribute('aria-activedescendant');
}

function toggle(name) {
  const had = state.labels.includes(name);
  state.labels = had ? state.labels.filter((label) => label !== name) : [...state.labels, name];
  const at = active;
  if (input().value) input().value = '';
  showLabels();
  if (!list().hidden) {
    fill();
    const kept = options().findIndex((option) => option.dataset.label === name);
    setActive(kept < 0 ? at : kept);
  }
  changed();
}

/** Shows the chosen labels. */
export function showLabels() {
  const chips = state.labels.map((name) => make('li', {}, make(
    'button',
    {
      type: 'button',
      class: 'chip',
      'aria-label': `Remove the label ${name}`,
      data: { testid: 'label-chip', label: name },
      on: {
        click: () => {
          toggle(name);
          input().focus({ preventScroll: true });
          close();
        },
      },
    },
    labelDot(name),
    name,
    icon('close'),
  )));
  byId('label-chips').replaceChildren(...chips);
  input().placeholder = state.labels.length ? 'Another label' : 'All labels';
}

function onKey(event) {
  const { key } = event;
  if (key === 'ArrowDown' || key === 'ArrowUp') {
    event.preventDefault();
    if (list().hidden) open();
    setActive(active < 0 ? (key === 'ArrowDown' ? 0 : -1) : active + (key === 'ArrowDown' ? 1 : -1));
  } else if (key === 'Enter') {
    event.preventDefault();
    const option = options()[active] ?? (options().length === 1 || input().value ? options()[0] : null);
    if (!list().hidden && option?.dataset.label !== undefined) toggle(option.dataset.label);
  } else if (key === 'Escape' && !list().hidden) {
    event.preventDefault();
    close();
  } else if (key === 'Backspace' && !input().value && state.labels.length) {
    toggle(state.labels.at(-1));
  }
}

/** Wires the filter; `onChange` is called after the state was changed. */
export function setUpLabels(onChange) {
  changed = onChange;
  input().addEventListener('keydown', onKey);
  input().addEventListener('input', () => {
    open();
    setActive(input().value ? 0 : -1);
  });
  input().addEventListener('click', open);
  input().addEventListener('blur', close);
  list().addEventListener('pointerdown', (event) => event.preventDefault()); // keeps the focus in the input
}
