/** Small helpers to build and find elements; text always goes in as text, never as markup. */

const SVG = 'http://www.w3.org/2000/svg';

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A new element: attributes by name, `on` for listeners, `data` for the dataset, then its children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === 'data') Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** One of the icons drawn in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, 'svg');
  const use = document.createElementNS(SVG, 'use');
  use.setAttribute('href', `#icon-${name}`);
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  svg.append(use);
  return svg;
}

/** `act`, run once the calls have paused for `wait` milliseconds. */
export function paused(act, wait) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...values), wait);
  };
}

/** Opens a <dialog>; its [data-close] buttons and a click beside it close it. */
export function openDialog(dialog) {
  if (!dialog.dataset.ready) {
    dialog.dataset.ready = 'true';
    dialog.addEventListener('click', (event) => {
      if (event.target === dialog || event.target.closest('[data-close]')) dialog.close();
    });
  }
  if (!dialog.open) dialog.showModal();
}
