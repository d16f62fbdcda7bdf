// Formats of rates, durations and sizes, and the math of reports. Pure functions without DOM access.

/** Round to significant digits. */
const digits = (value, count) => Number(value.toPrecision(count));

export const whole = (value) => Math.round(value).toLocaleString("en");

/** A probability as "1 in 3,000", with two significant digits. */
export function oneIn(rate) {
  if (rate >= 0.7) return "nearly all";
  if (rate <= 0) return "never";
  return `1 in ${many(1 / rate)}`;
}

const two = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

/** 3300 as “3,300”, 3300000 as “3.3 million”. Estimates have two significant digits. */
export function many(n) {
  if (n >= 999.5e6) return `${two.format(n / 1e9)} billion`;
  if (n >= 999.5e3) return `${two.format(n / 1e6)} million`;
  return two.format(n);
}

/** Odds as "3 to 1" or "1 to 400". */
export const ratio = (odds) => (odds >= 1 ? `${whole(digits(odds, 2))} to 1` : `1 to ${whole(digits(1 / odds, 2))}`);

/** A share as "27 in 100", finer if it is small. A count of zero does not prove a share of zero. */
export function inHundred(share) {
  if (share >= 0.995) return share < 1 ? "nearly all" : "all";
  if (share >= 0.0095) return `${Math.round(share * 100)} in 100`;
  return share >= 0.0005 ? `${Math.round(share * 1000)} in 1,000` : "hardly any";
}

export function duration(seconds) {
  if (seconds < 90) return counted(Math.max(1, Math.round(seconds)), "second");
  if (seconds < 5400) return counted(Math.round(seconds / 60), "minute");
  if (seconds < 129_600) return counted(Math.round(seconds / 3600), "hour");
  if (seconds < 5_184_000) return counted(Math.round(seconds / 86_400), "day");
  if (seconds < 47_304_000) return counted(Math.round(seconds / 2_628_000), "month");
  return counted(Math.round(seconds / 31_536_000), "year");
}

export const counted = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

export function bytes(count) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let power = 0;
  for (; count >= 999.5 && power < units.length - 1; power++) count /= 1000;
  return `${power === 0 || count >= 99.5 ? Math.round(count) : digits(count, 2)} ${units[power]}`;
}

const MINUTE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const SECOND = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

/** A time in the user's time zone. */
export const when = (text) => MINUTE.format(new Date(text));

/** The same with seconds and zone, for comparison with other records. */
export const toTheSecond = (text) => SECOND.format(new Date(text));

/** How often an event of probability `rate` occurs with `daily` trials a day. */
export function everySo(rate, daily) {
  const days = 1 / (rate * daily);
  if (days >= 1.5) return `once in ${duration(days * 86_400)}`;
  return `about ${counted(Math.round(1 / days), "time")} a day`;
}

/** The positions of the handle, from the largest risk: each a round "1 in N". One request asks for at most 20. */
export const STOPS = [3, 5, ...[10, 100, 1000, 1e4].flatMap((power) => [power, 2 * power, 5 * power]), 1e5].map((n) =>
  digits(1 / n, 3),
);

/** A linear scale from `domain` to `range`. */
export const linear =
  ([from, to], [first, last]) =>
  (value) =>
    first + ((value - from) / (to - from || 1)) * (last - first);

/** A logarithmic scale. */
export function logarithmic([from, to], range) {
  const scale = linear([Math.log(from), Math.log(to)], range);
  return (value) => scale(Math.log(Math.max(value, Number.MIN_VALUE)));
}

/** About `count` round values in `domain`. */
export function ticks([from, to], count) {
  const rough = (to - from) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((n) => n * unit >= rough * 0.999) * unit;
  const found = [];
  for (let n = Math.ceil(from / step - 1e-9); n * step <= to + step * 1e-9; n++) found.push(digits(n * step, 12));
  return found;
}
