/** Adding pictures to the gallery and removing them from it. */

import * as api from './api.js';
import { byId, make, openDialog } from './dom.js';
import { plural } from './format.js';
import { galleryClasses, galleryFacts, itemName } from './gallery.js';
import { hideError, say, showError } from './notices.js';
import { picture } from './pictures.js';

const PREVIEWS = 8;
let chosen = [];
let addresses = [];
let changed = async () => {};

function preview({ blob }) {
  const address = URL.createObjectURL(blob);
  addresses.push(address);
  return make('span', { class: 'picture whole' }, make('img', { src: address, alt: '' }));
}

function choose(pictures) {
  chosen = pictures;
  addresses.forEach(URL.revokeObjectURL);
  addresses = [];
  const more = pictures.length - PREVIEWS;
  byId('add-pictures').replaceChildren(...pictures.slice(0, PREVIEWS).map(preview), more > 0 ? `+ ${more}` : '');
  byId('add-confirm').textContent = pictures.length > 1 ? `Add ${plural(pictures.length, 'picture')}` : 'Add';
  byId('add-confirm').disabled = pictures.length === 0;
}

function suggest(names) {
  byId('add-labels').replaceChildren(...galleryClasses().map(({ name }) => make('option', { value: name })));
  const fill = (name) => () => {
    byId('add-label').value = name;
    byId('add-confirm').focus();
  };
  byId('add-suggested').replaceChildren(...names.map((name) => make('li', {},
    make('button', { type: 'button', class: 'chip', on: { click: fill(name) } }, name))));
}

/** Opens the form for these pictures ([{blob}]); labels near the picture are suggested. */
export function openAdding(pictures, suggested = []) {
  choose(pictures);
  suggest(suggested);
  byId('add-label').value = '';
  byId('add-choose').hidden = pictures.length > 0;
  hideError(byId('add-error'));
  openDialog(byId('add-dialog'));
  byId(pictures.length ? 'add-label' : 'add-choose').focus();
}

function whatHappened(added, known, label) {
  const where = label ? ` as ${label}` : '';
  const already = known ? ` ${plural(known, 'picture was', 'pictures were')} there already.` : '';
  const total = `The gallery now holds ${plural(galleryFacts().items, 'picture')}.`;
  return added ? `Added ${plural(added, 'picture')}${where}.${already} ${total}` : already.trim();
}

async function addAll(label) {
  let added = 0;
  let known = 0;
  let left = chosen; // others may be chosen meanwhile
  while (left.length) {
    try {
      await api.add(left[0].blob, label, left[0].name ?? left[0].blob.name);
      added += 1;
    } catch (error) {
      const several = known + added + left.length > 1;
      if (error.status !== 409 || !several) {
        if (added) await changed();
        throw error;
      }
      known += 1;
    }
    const rest = left.slice(1);
    if (chosen === left) chosen = rest; // what a second try still has to add
    left = rest;
  }
  await changed();
  return { added, known };
}

async function onAdd(event) {
  event.preventDefault();
  const label = byId('add-label').value.trim();
  const button = byId('add-confirm');
  hideError(byId('add-error'));
  button.disabled = true;
  try {
    const { added, known } = await addAll(label);
    byId('add-dialog').close();
    say(whatHappened(added, known, label));
  } catch (error) {
    choose(chosen);
    showError(error, null, byId('add-error'));
  } finally {
    button.disabled = false;
  }
}

/** Asks whether to remove a hit, and removes it. */
export function openRemoving(hit) {
  const dialog = byId('remove-dialog');
  const button = byId('remove-confirm');
  byId('remove-picture').replaceChildren(picture(hit));
  byId('remove-text').textContent = `${itemName(hit)}, ${hit.label ?? 'no label'}, will no longer be found.`;
  hideError(byId('remove-error'));
  button.disabled = false;
  button.onclick = async () => {
    button.disabled = true;
    try {
      await api.remove(hit.id);
      await changed();
      dialog.close();
      byId('found').focus({ preventScroll: true }); // the button that opened the dialog is gone
      say(`Removed ${itemName(hit)}. The gallery now holds ${plural(galleryFacts().items, 'picture')}.`);
    } catch (error) {
      button.disabled = false;
      showError(error, null, byId('remove-error'));
    }
  };
  openDialog(dialog);
}

/** `onChange()` is awaited after the gallery has changed. */
export function setUpWriting(onChange) {
  changed = onChange;
  byId('add-form').addEventListener('submit', onAdd);
  byId('add-choose').addEventListener('click', () => byId('add-file').click());
  byId('add-file').addEventListener('change', (event) => {
    choose([...event.target.files].map((file) => ({ blob: file })));
    event.target.value = '';
    byId('add-label').focus();
  });
  byId('add-open').addEventListener('click', () => openAdding([]));
}
