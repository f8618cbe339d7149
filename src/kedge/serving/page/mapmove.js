/** Moving over the map: wheel, drag, pinch and keys. */

const SLACK = 6;
const STEP = 60;

/** Wires a canvas to a view. acts: {redraw, hover(x, y), leave, pick(x, y, touch), aim, choose} */
export function moveMap(canvas, view, acts) {
  const pointers = new Map();
  let start = null;
  let moved = false;

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  const gap = () => {
    const [one, other] = [...pointers.values()];
    return { wide: Math.hypot(one.x - other.x, one.y - other.y), x: (one.x + other.x) / 2, y: (one.y + other.y) / 2 };
  };

  canvas.addEventListener('wheel', (event) => {
    event.preventDefault();
    const { x, y } = place(event);
    const lines = event.deltaMode === 1 ? 16 : 1;
    view.zoomBy(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.0018)), x, y);
    acts.leave();
    acts.redraw();
  }, { passive: false });

  canvas.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, place(event));
    start = place(event);
    if (pointers.size === 1) moved = false;
  });

  canvas.addEventListener('pointermove', (event) => {
    const now = place(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      if (event.pointerType === 'mouse') acts.hover(now.x, now.y);
      return;
    }
    if (pointers.size === 2) {
      const old = gap();
      pointers.set(event.pointerId, now);
      const fresh = gap();
      view.zoomBy(fresh.wide / Math.max(old.wide, 1), fresh.x, fresh.y);
      view.move(fresh.x - old.x, fresh.y - old.y);
      moved = true;
    } else {
      if (!moved && Math.hypot(now.x - start.x, now.y - start.y) < SLACK) return;
      moved = true;
      pointers.set(event.pointerId, now);
      view.move(now.x - before.x, now.y - before.y);
    }
    acts.leave();
    acts.redraw();
  });

  canvas.addEventListener('pointerup', (event) => {
    const known = pointers.delete(event.pointerId);
    if (known && !moved && pointers.size === 0) {
      const { x, y } = place(event);
      acts.pick(x, y, event.pointerType !== 'mouse');
    }
  });
  canvas.addEventListener('pointercancel', (event) => pointers.delete(event.pointerId));
  canvas.addEventListener('pointerleave', (event) => {
    if (event.pointerType === 'mouse') acts.leave();
  });

  const keys = {
    ArrowLeft: () => view.move(STEP, 0),
    ArrowRight: () => view.move(-STEP, 0),
    ArrowUp: () => view.move(0, STEP),
    ArrowDown: () => view.move(0, -STEP),
    '+': () => view.zoomBy(1.4),
    '=': () => view.zoomBy(1.4),
    '-': () => view.zoomBy(1 / 1.4),
    0: () => view.reset(),
  };
  canvas.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === 'Enter') acts.choose();
    else if (event.key === 'Escape') acts.leave();
    else if (event.key in keys) {
      keys[event.key]();
      acts.redraw();
      acts.aim();
    } else return;
    event.preventDefault();
  });
  canvas.addEventListener('blur', acts.leave);
}
