/** Puts the page together: what is asked, answered and shown. */

import { showFacts } from './about.js';
import { setUpAnchors, showAnchors } from './anchors.js';
import * as api from './api.js';
import { byId } from './dom.js';
import { keepWithinLimits, setUpFilters, showFilters } from './filters.js';
import { size } from './format.js';
import { galleryFacts, loadGallery } from './gallery.js';
import { setUpIntake } from './intake.js';
import { takeKey } from './key.js';
import { setUpLabels, showLabels } from './labels.js';
import { forgetMap, placeOnMap, setUpMap, showMap } from './map.js';
import { hideError, say, showError } from './notices.js';
import { showEncoding, showItem, showQuery, showWithoutModel } from './query.js';
import { forgetResults, setUpResults, showResults, showWaiting } from './results.js';
import { setUpShortcuts } from './shortcuts.js';
import { setUpStarters, showStarters } from './start.js';
import { keepPicture, readState, sameQuery, state, writeState } from './state.js';
import { setUpTheme } from './theme.js';
import { openAdding, openRemoving, setUpWriting } from './writing.js';

let running = null;
let answered = { query: null, answer: null, settings: null };

const settings = () => JSON.stringify([state.k, state.rank, state.method, state.probes, state.labels]);

function showView() {
  const onMap = state.view === 'map';
  const asked = state.query !== null;
  byId('view-results').setAttribute('aria-pressed', String(!onMap));
  byId('view-map').setAttribute('aria-pressed', String(onMap));
  byId('page').dataset.view = state.view;
  byId('map-view').hidden = !onMap;
  byId('results-view').hidden = onMap || !asked;
  byId('starters').hidden = onMap || asked;
  byId('shuffle').hidden = onMap || asked;
  const invitation = galleryFacts()?.model === null ? 'Start from one of these' : 'Or start from one of these';
  if (!asked) byId('found-title').textContent = onMap ? 'The gallery as a map' : invitation;
  if (onMap && galleryFacts()) showMap();
}

function showEverything() {
  showQuery(state.query);
  showFilters();
  showLabels();
  showView();
}

/* No query: the invitation, and pictures to start from. */
function showInvitation() {
  running?.abort();
  byId('found').removeAttribute('aria-busy');
  answered = { query: null, answer: null, settings: null };
  byId('unknown').hidden = true;
  forgetResults();
  showAnchors([]);
  placeOnMap(null);
  showEverything();
  showStarters(ask).catch((error) => showError(error, showInvitation));
}

function showAnswer(query, answer) {
  answered = { query, answer, settings: settings() };
  hideError();
  byId('unknown').hidden = answer.unknown !== true;
  showResults(answer);
  showAnchors(answer.nearest);
  showEncoding(query, answer.seconds);
  placeOnMap(answer);
}

async function nameItem(query) {
  if (query.id === undefined) return;
  const unnamed = { id: query.id, name: null, label: null }; // the search itself says what is wrong
  showItem(query, query.name === undefined ? await api.item(query.id).catch(() => unnamed) : query);
}

/* A newer search replaces the one under way. Resolves to whether this one was answered. */
async function search(query) {
  running?.abort();
  const own = (running = new AbortController());
  byId('found').setAttribute('aria-busy', 'true');
  showWaiting(state.k);
  try {
    const answer = await api.search(query, state, own.signal);
    if (own.signal.aborted) return false;
    showAnswer(query, answer);
    return true;
  } catch (error) {
    if (api.isStale(error) || own.signal.aborted) return false;
    throw error;
  } finally {
    if (running === own) byId('found').removeAttribute('aria-busy');
  }
}

/** Searches with a picture of the gallery or of the reader's; it becomes an entry of the history once answered. */
async function ask(query, { asNew = true } = {}) {
  hideError();
  state.query = query;
  showEverything();
  if (asNew) scrollTo({ top: 0 });
  nameItem(query);
  try {
    if (!(await search(query))) return;
    writeState(asNew);
  } catch (error) {
    state.query = answered.query; // back to what is still on the page
    if (state.query) {
      showEverything();
      nameItem(state.query);
      showEncoding(state.query, answered.answer.seconds);
    } else showInvitation();
    showError(error, () => ask(query, { asNew }));
  }
}

/* A query that was answered before there was a map has no place on it: it is asked once more. */
function placeAnswered() {
  if (answered.query?.text !== undefined) return; // a text never has one
  if (answered.answer && !answered.answer.place && sameQuery(state.query, answered.query)) {
    ask(answered.query, { asNew: false });
  }
}

function askWithPicture(file) {
  const { model, limits } = galleryFacts() ?? {};
  if (!limits) return;
  if (!model) {
    showError(new api.Refused(422, 'This gallery has no model, so it can only be searched with its own pictures.'));
  } else if (file.size > limits.bytes) {
    const [own, most] = [size(file.size), size(limits.bytes)];
    showError(new api.Refused(413, `The picture is too large: it has ${own}, and the server takes up to ${most}.`));
  } else ask(keepPicture(file, file.name));
  scrollTo({ top: 0 });
}

function changeSettings() {
  showFilters();
  const pending = state.query !== null && !sameQuery(state.query, answered.query);
  if (!pending) writeState(false); // a query without an answer has no entry of its own yet
  if (state.query) ask(state.query, { asNew: pending });
}

function changeView(view) {
  if (state.view === view) return;
  state.view = view;
  writeState(true);
  showView();
}

function followHistory() {
  takeKey();
  if (!galleryFacts()) {
    start();
    return;
  }
  readState();
  keepWithinLimits();
  hideError();
  if (state.query === null) showInvitation();
  else if (sameQuery(state.query, answered.query) && answered.settings === settings()) showEverything();
  else ask(state.query, { asNew: false });
}

/* After the gallery has changed: its facts, and what is on the page. */
async function refresh() {
  const { classes } = galleryFacts();
  await loadGallery();
  if (classes !== galleryFacts().classes) forgetResults(); // the colours of the classes have changed
  showFacts();
  forgetMap();
  if (state.view === 'map') showMap();
  if (state.query) await ask(state.query, { asNew: false });
  else await showStarters(ask, true);
}

function goHome(event) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  if (state.query === null && state.view === 'results') return;
  state.query = null;
  state.view = 'results';
  writeState(true);
  showInvitation();
}

function addQuery() {
  const near = answered.answer?.searches[0].hits.map(({ label }) => label).filter(Boolean) ?? [];
  openAdding([state.query], [...new Set(near)].slice(0, 3));
}

async function start() {
  try {
    await loadGallery();
  } catch (error) {
    showError(error, start);
    return;
  }
  showFacts();
  if (!galleryFacts().model) showWithoutModel();
  followHistory();
}

setUpTheme();
takeKey();
const wide = matchMedia('(min-width: 56.25rem)').matches;
byId('settings').open = wide;
byId('about').open = wide;
readState();
showEverything();

setUpIntake(askWithPicture, (text) => ask({ text }));
setUpFilters(changeSettings);
setUpLabels(changeSettings);
setUpResults({ onSearch: ask, onRemove: openRemoving });
setUpStarters();
setUpAnchors(ask);
setUpMap(ask, placeAnswered);
setUpWriting(refresh);
setUpShortcuts({ toMap: () => changeView(state.view === 'map' ? 'results' : 'map') });
api.onBusy((seconds) => say(`The server is busy; trying again in ${seconds} s.`));
byId('view-results').addEventListener('click', () => changeView('results'));
byId('view-map').addEventListener('click', () => changeView('map'));
byId('shuffle').addEventListener('click', () => showStarters(ask, true).catch((error) => showError(error)));
byId('home').addEventListener('click', goHome);
byId('skip').addEventListener('click', (event) => {
  event.preventDefault(); // a new history entry would lose a dropped picture
  byId('found').focus();
});
byId('add').addEventListener('click', addQuery);
addEventListener('popstate', followHistory);
start();
