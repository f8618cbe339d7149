/** What is asked for and how it is shown; kept in the address, so that Back, reload and sharing work. */

const METHODS = ['two_stage', 'brute_force', 'both'];
const RANKS = ['auto', 'class', 'looks'];
const PLAIN = { k: 20, rank: 'auto', method: 'two_stage', probes: 1, view: 'results' };

/* Pictures that were dropped have no address: they are kept here, and the history entry holds their number. */
const kept = new Map();

/** {query: {id} | {text} | {picture, blob, name} | null, k, rank, method, probes, labels, view} */
export const state = { query: null, labels: [], ...PLAIN };

const wholeNumber = (text, otherwise) => (/^\d{1,9}$/.test(text ?? '') && Number(text) > 0 ? Number(text) : otherwise);

/** A query with a picture of the reader's own. */
export function keepPicture(blob, name) {
  const query = { picture: kept.size + 1, blob, name };
  kept.set(query.picture, query);
  return query;
}

/** Takes the state from the address and the history entry. */
export function readState() {
  const asked = new URLSearchParams(location.search);
  state.k = wholeNumber(asked.get('k'), PLAIN.k);
  state.probes = wholeNumber(asked.get('probes'), PLAIN.probes);
  state.rank = RANKS.includes(asked.get('rank')) ? asked.get('rank') : PLAIN.rank;
  state.method = METHODS.includes(asked.get('method')) ? asked.get('method') : PLAIN.method;
  state.view = asked.get('view') === 'map' ? 'map' : PLAIN.view;
  state.labels = [...new Set(asked.getAll('label'))];
  const item = asked.get('item');
  if (/^\d{1,15}$/.test(item ?? '')) state.query = { id: Number(item) };
  else if (asked.get('text')) state.query = { text: asked.get('text') };
  else state.query = kept.get(history.state?.picture) ?? null;
}

function address() {
  const asked = new URLSearchParams();
  if (state.query?.id !== undefined) asked.set('item', state.query.id);
  if (state.query?.text !== undefined) asked.set('text', state.query.text);
  for (const [name, plain] of Object.entries(PLAIN)) if (state[name] !== plain) asked.set(name, state[name]);
  state.labels.forEach((label) => asked.append('label', label));
  return asked.size ? `?${asked}` : location.pathname;
}

/** Writes the state into the address: as a new entry, or over the present one. */
export function writeState(asNew) {
  const entry = { picture: state.query?.picture ?? null };
  if (asNew) history.pushState(entry, '', address());
  else history.replaceState(entry, '', address());
}

/** Whether two queries ask with the same picture or text. */
export const sameQuery = (one, other) => ['id', 'text', 'picture'].every((name) => one?.[name] === other?.[name]);
