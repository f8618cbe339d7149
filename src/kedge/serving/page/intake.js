/** The ways a query gets in: drop, paste, file chooser and camera, and a text. */

import { byId } from './dom.js';

const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes('Files');
const dialogOpen = () => document.querySelector('dialog[open]') !== null;

function setUpDrop(onPicture) {
  const cover = byId('dropping');
  let inside = 0;
  const leave = () => {
    inside = 0;
    cover.hidden = true;
  };
  addEventListener('dragenter', (event) => {
    if (!holdsFiles(event) || dialogOpen()) return;
    event.preventDefault();
    inside += 1;
    cover.hidden = false;
  });
  addEventListener('dragleave', (event) => {
    if (!holdsFiles(event)) return;
    inside -= 1;
    if (inside <= 0) leave();
  });
  addEventListener('dragover', (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = dialogOpen() ? 'none' : 'copy';
  });
  addEventListener('drop', (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault(); // otherwise the browser opens the file in place of the page
    leave();
    const [file] = event.dataTransfer.files;
    if (file && !dialogOpen()) onPicture(file);
  });
}

function setUpChoosers(onPicture) {
  for (const id of ['file', 'camera']) {
    const input = byId(id);
    input.addEventListener('change', () => {
      const [file] = input.files;
      input.value = ''; // so that the same file can be chosen again
      if (file) onPicture(file);
    });
  }
  document.querySelectorAll('[data-pick]').forEach((button) => {
    button.addEventListener('click', () => byId(button.dataset.pick).click());
  });
}

/** Hands every picture that comes in to `onPicture(file)`, every text to `onText(text)`. */
export function setUpIntake(onPicture, onText) {
  setUpDrop(onPicture);
  setUpChoosers(onPicture);
  byId('describe').addEventListener('submit', (event) => {
    event.preventDefault();
    const text = byId('text').value.trim();
    if (text) onText(text);
  });
  addEventListener('paste', (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find(({ type }) => type.startsWith('image/'));
    if (!file || dialogOpen()) return;
    event.preventDefault();
    onPicture(file);
  });
  if (/Mac|iPhone|iPad/.test(navigator.platform)) byId('paste-keys').textContent = '⌘ V';
}
