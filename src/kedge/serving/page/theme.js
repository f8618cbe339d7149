/** Light, dark or as the system has it; remembered in this browser. */

import { byId, icon } from './dom.js';

const NEXT = { system: 'light', light: 'dark', dark: 'system' };
const PLACE = 'kedge-theme';
const systemDark = matchMedia('(prefers-color-scheme: dark)');
const listeners = [];

function remembered() {
  try {
    const theme = localStorage.getItem(PLACE);
    return theme in NEXT ? theme : 'system';
  } catch {
    return 'system'; // storage may be forbidden; the page works without it
  }
}

function apply(theme) {
  document.documentElement.dataset.theme = theme;
  const button = byId('theme');
  button.replaceChildren(icon(theme));
  button.setAttribute('aria-label', `Theme: ${theme}. Switch to ${NEXT[theme]}.`);
  button.title = `Theme: ${theme}`;
  listeners.forEach((tell) => tell());
}

/** Whether the page is dark now. */
export function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme === 'dark' || (theme !== 'light' && systemDark.matches);
}

/** Calls `tell` whenever the colours have changed. */
export function onTheme(tell) {
  listeners.push(tell);
}

/** Applies the remembered theme and wires the button. */
export function setUpTheme() {
  apply(remembered());
  systemDark.addEventListener('change', () => listeners.forEach((tell) => tell()));
  byId('theme').addEventListener('click', () => {
    const theme = NEXT[document.documentElement.dataset.theme];
    try {
      localStorage.setItem(PLACE, theme);
    } catch {
      // not remembered, still applied
    }
    apply(theme);
  });
}
