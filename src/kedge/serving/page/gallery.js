/** What is known of the gallery: its facts, classes and anchors. */

import * as api from './api.js';

let facts = null;
let classes = [];
let anchors = [];

/** Asks the server anew. */
export async function loadGallery() {
  const [info, classAnswer, anchorAnswer] = await Promise.all([api.info(), api.classes(), api.anchors()]);
  facts = info;
  classes = classAnswer.classes;
  anchors = anchorAnswer.anchors;
}

/** The answer of /info, or null before it came. */
export const galleryFacts = () => facts;

/** [{name, items}], sorted by name. */
export const galleryClasses = () => classes;

/** [{anchor, name, items}] */
export const galleryAnchors = () => anchors;

/** What to call the picture of an item or a hit. */
export const itemName = ({ id, name }) => name ?? `Picture ${id}`;
