// Builds elements: text goes in as text only, whatever it holds. Knows no routes and no state.

export const PHASES = {
  tokenize: 'tokenize', place: 'place', recovery: 'recovery', reserve: 'reserve', queue: 'queue',
  queue_or_prefill: 'queue or prefill', prefill: 'prefill', push: 'push', exposed_transfer: 'transfer',
  slot_wait: 'slot wait', decode: 'decode', delivery: 'delivery', unaccounted: 'unaccounted',
};

export function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === 'function') node.addEventListener(name, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function svg(tag, attributes, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function seconds(s) {
  if (s === null || s === undefined) return '–';
  if (s >= 100) return `${Math.round(s)} s`;
  if (s >= 1) return `${s.toFixed(s >= 10 ? 1 : 2)} s`;
  return s >= 0.01 ? `${Math.round(s * 1000)} ms` : `${(s * 1000).toFixed(1)} ms`;
}

export function ago(s) {
  if (s < 1) return 'just now';
  if (s < 100) return `${Math.round(s)} s ago`;
  return s < 6000 ? `${Math.round(s / 60)} min ago` : `${Math.round(s / 3600)} h ago`;
}

export function bytes(n) {
  for (const [unit, size] of [['TB', 1e12], ['GB', 1e9], ['MB', 1e6], ['kB', 1e3]]) {
    if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
  }
  return `${Math.round(n)} B`;
}

export const count = (n) => n.toLocaleString('en-US', { maximumFractionDigits: n < 10 ? 1 : 0 });
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? '' : 's'}`;

const inWords = (spans) =>
  spans.map(([phase, s]) => `${PHASES[phase] ?? phase} ${seconds(s)}`).join(', ');

// Parts of a bar that is filled by them together, each as long as its share.
export function parts(shares) {
  const sum = shares.reduce((all, [, share]) => all + share, 0) || 1;
  return shares.map(([name, share]) => {
    const part = h('i', { class: name });
    part.style.flexGrow = share / sum;
    return part;
  });
}

// Spans as one bar; its parts are told in words to who does not see it, and on hovering.
export function phaseBar(spans) {
  const told = inWords(spans);
  const bar = h('div', { class: 'bar', role: 'img', 'aria-label': told, title: told });
  bar.append(...parts(spans.map(([phase, s]) => [`c-${phase}`, s])));
  return bar;
}

export function blocksBar(blocks) {
  const told = `${count(blocks.num_used)} used, ${count(blocks.num_quarantined)} quarantined, ` +
    `${count(blocks.num_cached)} cached of ${plural(blocks.num_total, 'KV block')}`;
  const bar = h('div', { class: 'bar kvbar', role: 'img', 'aria-label': told, title: told });
  const kinds = ['used', 'quarantined', 'cached', 'free'];
  bar.append(...parts(kinds.map((kind) => [`c-${kind}`, blocks[`num_${kind}`]])));
  return bar;
}

// Lines over the same slots, 0 at the bottom; where a value is null its line has a hole.
export function spark(lines, label) {
  const top = Math.max(...lines.flatMap((line) => line.values.map((v) => v ?? 0))) || 1;
  const last = lines[0].values.length - 1;
  const picture = svg('svg', {
    class: 'spark', viewBox: `0 0 ${last} 40`, preserveAspectRatio: 'none', role: 'img',
    'aria-label': label,
  });
  picture.append(svg('path', { class: 'base', d: `M0 40H${last}` }));
  for (const { values, phase, stroke } of lines) {
    let line = '';
    values.forEach((value, i) => {
      if (value === null) return;
      const isHole = i === 0 || values[i - 1] === null;
      line += `${isHole ? 'M' : 'L'}${i} ${(38 - (value / top) * 36).toFixed(1)}`;
      if (isHole && (values[i + 1] ?? null) === null) line += 'h.01';
    });
    if (phase) picture.append(svg('path', { class: `area c-${phase}`, d: `${line}V40H0Z` }));
    picture.append(svg('path', { class: `c-${stroke}`, d: line }));
  }
  return picture;
}

export const swatch = (phase) => h('span', { class: `swatch c-${phase}`, 'aria-hidden': 'true' });

// The bars of one row; what each was shows on hovering.
function track(total, first, bars, paint) {
  const at = (s) => `${((100 * s) / total).toFixed(2)}%`;
  const picture = svg('svg', { 'aria-hidden': 'true', focusable: 'false' });
  picture.append(svg('rect', { class: 'ground', y: 2, width: '100%', height: 12, rx: 3 }));
  for (const bar of bars) {
    const what = svg('title', null, `${bar.what}, ${seconds(bar.seconds)} from ${seconds(bar.begin_s)} on`);
    const rect = svg('rect', { ...paint, y: 2, height: 12, rx: 1.5, x: at(bar.begin_s) }, what);
    rect.style.width = `max(2px, ${at(bar.seconds)})`;
    picture.append(rect);
  }
  if (first) picture.append(svg('line', { class: 'first', x1: at(first), x2: at(first), y1: -2, y2: 18 }));
  return picture;
}

// A request's phases one below the other on one scale; long gaps in rows of their own.
export function waterfall(request) {
  const ends = request.rows.flatMap((row) => row.bars.map((bar) => bar.begin_s + bar.seconds));
  const total = Math.max(request.total_s, ...ends, 1e-9);
  const body = h('tbody');
  const add = (name, bars, paint, took, note) => {
    const cell = h('td', null, track(total, request.ttft_s, bars, paint), note ? h('p', { class: 'what' }, note) : null);
    body.append(h('tr', null, h('th', { scope: 'row' }, swatch(name[0]), name[1]), cell,
      h('td', { class: 'n' }, seconds(took))));
  };
  for (const { phase, bars, seconds: took, note } of request.rows) {
    const paint = phase === 'queue_or_prefill' ? { fill: 'url(#stripes)' } : { class: `c-${phase}` };
    add([phase, PHASES[phase] ?? phase], bars, paint, took, note);
    if (phase !== 'decode') continue;
    for (const gap of request.gaps) {
      const what = `Token ${gap.index} came ${seconds(gap.seconds)} after the one before: ${gap.what_ran}.`;
      add(['gap', 'gap'], [{ ...gap, what }], { class: 'gapbox', fill: 'url(#hatch)' }, gap.seconds, what);
    }
  }
  const scale = `0 to ${seconds(total)}` +
    (request.ttft_s ? `; dashed: the first token, after ${seconds(request.ttft_s)}` : '') +
    (request.uncertainty_s > total / 200 ? `; workers' bars within ${seconds(request.uncertainty_s)}` : '');
  return h('table', { class: 'waterfall', 'aria-label': 'Phases of the request' },
    h('thead', null, h('tr', null, h('th', { scope: 'col' }, 'phase'),
      h('th', { scope: 'col', class: 'axis' }, scale), h('th', { scope: 'col', class: 'n' }, 'took'))),
    body);
}

// Makes the children of parent those of items, by key, and leaves those alone that stay: who has
// the focus keeps it, and if its row goes the next one, or the heading, takes it.
export function keyed(parent, items, key, make, update) {
  const keys = new Set(items.map((item) => String(key(item))));
  const old = new Map();
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  let lost = -1;
  [...parent.children].forEach((node, i) => {
    if (keys.has(node.dataset.key)) { old.set(node.dataset.key, node); return; }
    if (node.contains(focused)) lost = i;
    node.remove();
  });
  items.forEach((item, i) => {
    const name = String(key(item));
    let node = old.get(name);
    if (!node) { node = make(item); node.dataset.key = name; }
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
    const told = JSON.stringify(item);
    if (node.told !== told) { node.told = told; update(node, item); }
  });
  if (lost < 0) {
    // A row that is moved loses the focus.
    if (focused?.isConnected && focused !== document.activeElement) focused.focus();
    return;
  }
  const next = parent.children[Math.min(lost, parent.children.length - 1)]?.querySelector('button');
  (next ?? parent.closest('section')?.querySelector('h2'))?.focus();
}
