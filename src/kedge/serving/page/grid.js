/** Arrow keys in a grid of cards; Tab enters and leaves it in one step. */

const cardsOf = (grid) => [...grid.children].filter((card) => card.querySelector('.hit-search'));

function setCurrent(cards, current) {
  for (const card of cards) {
    card.querySelectorAll('button').forEach((button) => {
      button.tabIndex = card === current ? 0 : -1;
    });
  }
}

function columns(cards) {
  const below = cards.findIndex((card) => card.offsetTop > cards[0].offsetTop);
  return below < 0 ? cards.length : below;
}

function target(key, at, cards) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(cards), ArrowDown: columns(cards) };
  if (key === 'Home') return 0;
  if (key === 'End') return cards.length - 1;
  if (!(key in steps)) return null;
  const to = at + steps[key];
  return to >= 0 && to < cards.length ? to : at;
}

/** Fills the grid with cards and keeps the focus where it was. */
export function fillGrid(grid, cards) {
  const focused = grid.contains(document.activeElement) ? document.activeElement : null;
  grid.replaceChildren(...cards);
  const movable = cardsOf(grid);
  const current = movable.find((card) => card.contains(focused)) ?? movable[0];
  if (current) setCurrent(movable, current);
  if (focused && current?.contains(focused)) focused.focus({ preventScroll: true });
}

/** Lets the arrow keys move through the grid. */
export function moveByArrows(grid) {
  grid.addEventListener('keydown', (event) => {
    const cards = cardsOf(grid);
    const at = cards.findIndex((card) => card.contains(event.target));
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = target(event.key, at, cards);
    if (to === null) return;
    event.preventDefault();
    setCurrent(cards, cards[to]);
    cards[to].querySelector('.hit-search').focus();
  });
  grid.addEventListener('focusin', (event) => {
    const cards = cardsOf(grid);
    const current = cards.find((card) => card.contains(event.target));
    if (current) setCurrent(cards, current);
  });
}
