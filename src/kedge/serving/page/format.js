/** Numbers as people read them. */

const whole = new Intl.NumberFormat('en');
const twoDigits = new Intl.NumberFormat('en', { maximumSignificantDigits: 2 });
const day = new Intl.DateTimeFormat('en-GB', { dateStyle: 'medium', timeStyle: 'short' });

/** 2000 → "2,000" */
export const count = (number) => whole.format(number);

/** 1, "picture" → "1 picture"; 2, "picture" → "2 pictures" */
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** 0.7312 → "0.73" */
export const distance = (number) => number.toFixed(number < 0.1 ? 3 : 2);

/** 0.00031 → "0.31 ms" */
export function time(seconds) {
  return seconds < 1 ? `${twoDigits.format(seconds * 1000)} ms` : `${twoDigits.format(seconds)} s`;
}

/** 0.0667 → "6.7 %" */
export const share = (part) => `${twoDigits.format(part * 100)} %`;

/** 4.13 → "4.1" */
export const short = (number) => twoDigits.format(number);

/** 20971520 → "20 MB" */
export const size = (bytes) => `${twoDigits.format(bytes / 2 ** 20)} MB`;

/** "2026-11-15T21:00:00Z" → "15 Nov 2026, 21:00", in the reader's time zone */
export const moment = (text) => (Number.isNaN(Date.parse(text)) ? text : day.format(new Date(text)));
