/** A colour, and for many classes a shape, for each class; the same on the map and beside every label. */

import { galleryClasses } from './gallery.js';
import { isDark } from './theme.js';

/* Hue and lightness of ten colours that stay apart for most colour-blind readers as well. */
const TEN = [
  [250, 0.55, 0.15], [50, 0.68, 0.16], [155, 0.58, 0.14], [18, 0.55, 0.19], [300, 0.55, 0.17],
  [95, 0.7, 0.14], [205, 0.66, 0.12], [345, 0.66, 0.17], [125, 0.48, 0.11], [275, 0.4, 0.15],
];
const GOLDEN_ANGLE = 137.508;
const SHAPES = 4;

/* With many classes neighbours in the list take far hues, and every third one another lightness. */
function many(index) {
  const hue = (index * GOLDEN_ANGLE + 20) % 360;
  return [hue, [0.58, 0.7, 0.46][index % 3], [0.16, 0.13, 0.13][index % 3]];
}

function tone(index, total, dark) {
  const [hue, light, chroma] = total <= TEN.length ? TEN[index] : many(index);
  const lightness = dark ? 0.52 + light * 0.4 : light;
  return `oklch(${lightness.toFixed(3)} ${(dark ? chroma * 0.92 : chroma).toFixed(3)} ${hue.toFixed(1)})`;
}

/** For the canvas: the colour of a class in the theme of the moment. */
export function classColour(index, total) {
  if (index < 0) return isDark() ? '#8b9098' : '#8a8d92';
  return tone(index, total, isDark());
}

/** Which of four shapes a class is drawn with; one alone where colours suffice. */
export const classShape = (index, total) => (total <= TEN.length || index < 0 ? 0 : index % SHAPES);

/** For CSS: the colour of a label, in both themes. */
export function labelColour(label) {
  const names = galleryClasses();
  const index = names.findIndex((entry) => entry.name === label);
  if (index < 0) return 'light-dark(#8a8d92, #8b9098)';
  return `light-dark(${tone(index, names.length, false)}, ${tone(index, names.length, true)})`;
}
