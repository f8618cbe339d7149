/** Which part of the map is seen: from the map's coordinates to the screen's and back. */

const CLOSEST = 60;
const MARGIN = 34;

/** A view of a map with these bounds on a surface of this size. */
export class MapView {
  constructor() {
    this.bounds = { left: -1, right: 1, low: -1, high: 1 };
    this.width = 1;
    this.height = 1;
    this.reset();
  }

  /** The whole map. */
  reset() {
    const { left, right, low, high } = this.bounds;
    this.x = (left + right) / 2;
    this.y = (low + high) / 2;
    this.zoom = 1;
  }

  /** Takes the bounds of the points as what "the whole map" is. */
  fit(xs, ys) {
    const range = (values) => values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)],
      [Infinity, -Infinity]);
    const [left, right] = xs.length ? range(xs) : [-1, 1];
    const [low, high] = ys.length ? range(ys) : [-1, 1];
    this.bounds = { left, right, low, high };
    this.reset();
  }

  get scale() {
    const { left, right, low, high } = this.bounds;
    const across = (this.width - 2 * MARGIN) / Math.max(right - left, 1e-6);
    const up = (this.height - 2 * MARGIN) / Math.max(high - low, 1e-6);
    return Math.max(1, Math.min(across, up)) * this.zoom;
  }

  screenX(x) {
    return this.width / 2 + (x - this.x) * this.scale;
  }

  screenY(y) {
    return this.height / 2 - (y - this.y) * this.scale;
  }

  /** Moves by pixels; what the middle shows stays within the map. */
  move(right, down) {
    const { bounds, scale } = this;
    this.x = Math.min(Math.max(this.x - right / scale, bounds.left), bounds.right);
    this.y = Math.min(Math.max(this.y + down / scale, bounds.low), bounds.high);
  }

  /** Zooms by a factor about a point of the screen, by default the middle. */
  zoomBy(factor, atX = this.width / 2, atY = this.height / 2) {
    const zoom = Math.min(Math.max(this.zoom * factor, 1), CLOSEST);
    const before = this.scale;
    const offsetX = (atX - this.width / 2) / before;
    const offsetY = (atY - this.height / 2) / before;
    const ratio = this.zoom / zoom;
    this.zoom = zoom;
    this.x += offsetX * (1 - ratio);
    this.y -= offsetY * (1 - ratio);
    this.move(0, 0);
  }
}
