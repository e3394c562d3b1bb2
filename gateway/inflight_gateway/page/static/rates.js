// Tokens per second, from counters that are read again and again.

const WINDOW = 6; // seconds that a rate is the mean of
const GAP = 20; // seconds without a look after which old counts say nothing

export class Rates {
  #seen = new Map(); // of each instance: [seconds, tokens], the oldest first

  /** Take the counters of all loads at a time in seconds. */
  take(time, loads) {
    for (const load of loads) {
      if (typeof load.generation_tokens !== "number") continue;
      const points = this.#seen.get(nameOf(load)) ?? [];
      const last = points.at(-1);
      // A smaller count is a restart's, an earlier time another machine's.
      if (last && (load.generation_tokens < last[1] || time < last[0] || time - last[0] > GAP)) points.length = 0;
      if (time !== points.at(-1)?.[0]) points.push([time, load.generation_tokens]);
      while (points.length > 2 && time - points[0][0] > WINDOW) points.shift();
      this.#seen.set(nameOf(load), points);
    }
  }

  /** The rate of these loads together, or null if none is known. */
  total(loads) {
    const known = loads.map((load) => this.#seen.get(nameOf(load)) ?? []).filter((points) => points.length > 1);
    if (!known.length) return null;
    return known.reduce((total, points) => {
      const [[from, before], [to, after]] = [points[0], points.at(-1)];
      return total + (after - before) / (to - from);
    }, 0);
  }
}

const nameOf = ({ address, model, instance }) => `${address} ${model} ${instance}`;
