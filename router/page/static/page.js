// Asks the router once a second for a snapshot and draws it; shows one request in full on demand.

import {
  PHASES, ago, blocksBar, bytes, count, h, keyed, parts, phaseBar, plural, seconds, spark, swatch, waterfall,
} from './draw.js';

const EVERY_MS = 1000;
const LATE_MS = 5000;
const KEY = 'twophase-admin-key';
const $ = (id) => document.getElementById(id);

function tell(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

class Refused extends Error {}
class Missing extends Error {}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: 'no-store', signal: AbortSignal.timeout(LATE_MS) });
  const told = await answer.json();
  if (answer.status === 401 || answer.status === 403) throw new Refused(told.error.message);
  if (answer.status === 400) throw new Missing('The router does not remember this request any more.');
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  return told;
}

// ---- the rates

function tile(title, big, unit, sub, lines, label) {
  return h('div', { class: 'tile' }, h('h2', null, title),
    h('p', { class: 'big' }, big, h('small', null, unit)), h('p', { class: 'sub' }, ...sub),
    spark(lines, label));
}

const minutes = (rates) => plural((rates.itl.p50_s.length * rates.slot_s) / 60, 'minute');

function throughput(title, what, perSecond, rates, field, phase) {
  const values = rates[field].map((tokens) => tokens / rates.slot_s);
  const label = `${title} a second over the last ${minutes(rates)}, at most ${count(Math.max(...values))}`;
  return tile(title, count(perSecond), ' /s', [what], [{ values, phase, stroke: phase }], label);
}

function latency(title, rates, field) {
  const { lately: now, ...slots } = rates[field];
  const lines = ['p99', 'p95', 'p50'].map((p) => ({ stroke: p, values: slots[`${p}_s`] }));
  const word = (p) => h('span', null, swatch(p), `${p} ${seconds(now[`${p}_s`])}`);
  const label = `${title} over the last ${minutes(rates)}; now p50 ${seconds(now.p50_s)}, ` +
    `p95 ${seconds(now.p95_s)}, p99 ${seconds(now.p99_s)}`;
  return tile(title, seconds(now.p50_s), ' p50', ['p95', 'p99'].map(word), lines, label);
}

function drawRates(rates) {
  $('rates').replaceChildren(
    throughput('Prompt tokens', 'read by prefill', rates.prompt_tokens_per_s, rates, 'num_prompt_tokens', 'prefill'),
    throughput('Output tokens', 'made by decode', rates.output_tokens_per_s, rates, 'num_output_tokens', 'decode'),
    latency('Time to first token', rates, 'ttft'),
    latency('Between two tokens', rates, 'itl'),
  );
}

// ---- pools and links

function pool(worker) {
  const isBad = worker.state !== 'ready';
  const wait = worker.queue_wait_p50_s === null ? '–'
    : `${seconds(worker.queue_wait_p50_s)}, ${seconds(worker.queue_wait_p95_s)}`;
  const pace = worker.role === 'prefill'
    ? ['speed', worker.prompt_tokens_per_s === null ? '–' : `${count(worker.prompt_tokens_per_s)} tok/s`]
    : ['step', seconds(worker.step_s)];
  const facts = [['waiting', worker.num_waiting ?? '–'], ['running', worker.num_running ?? '–'],
    ['wait p50, p95', wait], pace];
  const blocks = worker.blocks;
  const kv = blocks === null ? h('p', { class: 'kv' }, 'It has not said anything yet.')
    : h('div', { class: 'kv' }, blocksBar(blocks),
      `KV ${count(blocks.num_used)} used, ${count(blocks.num_cached)} cached of ${count(blocks.num_total)}`,
      blocks.num_quarantined ? h('span', { class: 'warn' },
        `, ${count(blocks.num_quarantined)} quarantined for ${seconds(blocks.quarantine_age_s)}`) : null);
  return [
    h('p', { class: 'who' }, worker.name, h('span', { class: `state${isBad ? ' warn' : ''}` }, worker.state)),
    h('dl', null, ...facts.map(([name, value], i) =>
      h('div', { class: i > 1 ? 'wide' : null }, h('dt', null, name), h('dd', null, String(value))))),
    kv,
  ];
}

function drawPools(state) {
  const rows = [];
  for (const role of ['prefill', 'decode']) {
    const workers = state.workers.filter((worker) => worker.role === role);
    if (role === 'prefill' && !workers.length && state.mode !== 'disaggregated') continue;
    rows.push({ name: `${role} pool`, empty: workers.length === 0 }, ...workers);
  }
  keyed($('pools'), rows, (row) => row.name, (row) => h('div', { class: row.role ? 'pool' : 'poolname' }),
    (node, row) => node.replaceChildren(...(row.role ? pool(row)
      : [`${row.name}${row.empty ? ': no worker is connected' : ''}`])));
  const { num_in_line: inLine, oldest_in_line_s: oldest } = state.demand;
  const more = state.num_workers - state.workers.length;
  tell($('line'), (inLine ? `${plural(inLine, 'request')} in the router's line for workers, the oldest for ${seconds(oldest)}. `
    : '') + (more > 0 ? `${plural(more, 'further worker')} not shown.` : ''));
  keyed($('stuck'), state.stuck, (worker) => worker.address, () => h('li', { class: 'warn' }),
    (node, worker) => tell(node, `${worker.name} was given up ${ago(worker.age_s)}: ${worker.why}`));
  const names = new Map();
  for (const worker of state.workers) {
    if (worker.kernels) names.set(worker.kernels, [...(names.get(worker.kernels) ?? []), worker.name]);
  }
  tell($('kernels'), [...names].map(([kernels, who]) => `${who.join(', ')}: ${kernels}`).join('. '));
}

function drawLinks({ links, mode }) {
  const cells = (link) => [
    h('th', { scope: 'row' }, `${link.sender} → ${link.receiver}`),
    h('td', { title: link.reason }, link.backend),
    h('td', { class: 'n' }, link.bytes_per_s === null ? '–' : `${bytes(link.bytes_per_s)}/s`),
    h('td', { class: 'n wide' }, seconds(link.latency_s)),
    h('td', { class: 'n' }, bytes(link.num_bytes)),
  ];
  tell($('no-links'), mode === 'disaggregated' ? 'No link is open: the first handoff opens one.'
    : `No KV cache is moved in mode ${mode}.`);
  table('links', links, (link) => `${link.sender} ${link.receiver} ${link.backend}`, () => h('tr'),
    (node, link) => node.replaceChildren(...cells(link)));
}

// ---- tables

function table(id, items, key, make, update) {
  $(id).hidden = items.length === 0;
  $(`no-${id}`).hidden = items.length > 0;
  keyed($(id).tBodies[0], items, key, make, update);
}

function opener(id) {
  return h('button', { type: 'button', class: 'open', title: id, click: (event) => show(event.currentTarget) }, id);
}

// The first cell keeps its button, and with it the focus; the others are drawn anew.
function requestRow(request) {
  return h('tr', null, h('th', { scope: 'row' }, opener(request.request_id), h('div', { class: 'state' })));
}

function fill(row, state, cells) {
  const [head] = row.children;
  const word = head.querySelector('.state');
  tell(word, state.text);
  word.classList.toggle('warn', Boolean(state.isBad));
  while (row.lastChild !== head) row.lastChild.remove();
  row.append(...cells);
}

const workers = ({ prefill_worker: prefill, decode_worker: decode }) =>
  (prefill === decode ? decode || '–' : `${prefill} → ${decode}`);
const tokens = (request) => `${count(request.num_prompt_tokens)} + ${count(request.num_output_tokens)}`;

function drawRunning(state) {
  table('running', state.running, (request) => request.request_id, requestRow, (row, request) => {
    const tries = request.num_attempts > 1 ? `, attempt ${request.num_attempts}` : '';
    fill(row, { text: (PHASES[request.phase] ?? request.phase) + tries, isBad: request.num_attempts > 1 }, [
      h('td', { class: 'wide who' }, workers(request)),
      h('td', { class: 'n wide' }, tokens(request)),
      h('td', { class: 'n' }, seconds(request.age_s)),
      h('td', { class: 'phases' }, phaseBar(request.spans)),
    ]);
  });
  tell($('h-running'), state.num_running > state.running.length
    ? `Running requests: the oldest ${state.running.length} of ${count(state.num_running)}` : 'Running requests');
}

function drawEnded(ended) {
  table('ended', ended.map(({ age_s: age, ...rest }) => ({ ...rest, told: ago(age) })),
    (request) => request.request_id, requestRow, (row, request) => {
      const slow = request.slow.map((phase) => PHASES[phase] ?? phase).join(', ');
      const isBad = request.finish_reason === 'error';
      const words = [isBad && 'failed', slow && `slow: ${slow}`];
      fill(row, { text: words.filter(Boolean).join(', '), isBad }, [
        h('td', { class: 'wide dim' }, request.told),
        h('td', { class: 'wide who' }, workers(request)),
        h('td', { class: 'n wide' }, tokens(request)),
        h('td', { class: 'n wide' }, request.ttft_s ? seconds(request.ttft_s) : '–'),
        h('td', { class: 'n' }, seconds(request.total_s)),
        h('td', { class: 'phases' }, phaseBar(request.spans)),
      ]);
    });
}

function drawJudged(judged) {
  const lately = `${plural(judged.num_requests, 'request')} that ended within the last ${judged.window_s / 60} minutes`;
  tell($('judged'), judged.num_requests === 0 ? 'No request has ended well within the last 5 minutes.'
    : judged.troubles.length === 0 ? `Nothing stood out in ${lately}.` : `Of ${lately}:`);
  keyed($('troubles'), judged.troubles, (trouble) => trouble.worst.phase, () => h('li', { class: 'trouble' }),
    (node, trouble) => {
      const { phase, symptom, evidence, advice } = trouble.worst;
      const button = node.querySelector('button') ?? opener('');
      const hadFocus = button === document.activeElement;
      button.title = trouble.worst_request_id;
      tell(button, button.title);
      node.replaceChildren(
        h('p', null, swatch(phase), h('b', null, PHASES[phase] ?? phase),
          `: ${symptom}`),
        h('p', { class: 'advice' }, `${plural(trouble.num_requests, 'request')}, ${seconds(trouble.seconds)} in all; the worst, `, button, ':'),
        h('p', null, evidence), h('p', { class: 'advice' }, advice));
      if (hadFocus) button.focus();
    });
  const most = Math.max(...judged.waits.map((wait) => wait.p95_s), 1e-9);
  table('waits', judged.waits, (wait) => wait.phase, () => h('tr'), (row, wait) => {
    const shares = [wait.p50_s, wait.p95_s - wait.p50_s, most - wait.p95_s].map((s) => Math.max(s, 0));
    const [half, more, rest] = parts(shares.map((share) => [`c-${wait.phase}`, share]));
    more.style.opacity = 0.4;
    rest.style.visibility = 'hidden';
    const bar = h('div', { class: 'bar', 'aria-hidden': 'true' }, half, more, rest);
    row.replaceChildren(
      h('th', { scope: 'row', class: 'phase' }, swatch(wait.phase), PHASES[wait.phase] ?? wait.phase),
      ...[wait.p50_s, wait.p95_s, wait.max_s].map((s, i) =>
        h('td', { class: i > 1 ? 'n wide' : 'n' }, seconds(Math.max(s, 0)))),
      h('td', { class: 'phases' }, bar));
  });
}

function drawScaling(scaling) {
  $('no-scaling').hidden = scaling.decisions.length > 0;
  tell($('no-scaling'), scaling.is_configured ? 'Nothing was changed yet.'
    : 'Scaling is not configured: the pools keep their sizes.');
  $('scaling').replaceChildren(...scaling.decisions.map(([age, sentence]) =>
    h('li', null, h('span', { class: 'age' }, ago(age)), sentence)));
}

function draw(state) {
  document.title = `${state.num_running ? `(${state.num_running}) ` : ''}twophase`;
  tell($('cluster'), `${state.model.split('/').pop()}, ${state.mode}`);
  $('cluster').title = state.model;
  $('unready').hidden = state.is_ready;
  tell($('unready'), 'Not ready: no token has come through both pools since the workers last changed.');
  drawRates(state.rates);
  drawPools(state);
  drawLinks(state);
  drawRunning(state);
  drawEnded(state.ended);
  drawJudged(state.judged);
  drawScaling(state.scaling);
}

// ---- one request

let shown = null;
let openedBy = null;
let openedIn = null;

const isRunning = (request) => !['stop', 'length', 'error'].includes(request.state);

function facts(request) {
  const { usage, transfer } = request;
  const pairs = [
    ['state', request.state === 'error' ? 'failed' : isRunning(request) ? PHASES[request.state] ?? request.state : `ended (${request.state})`],
    ['first token', seconds(request.ttft_s)],
    ['total', seconds(request.total_s)],
    ['prompt tokens', count(usage.num_prompt_tokens) +
      (usage.num_prefill_cached_tokens ? `, ${count(usage.num_prefill_cached_tokens)} cached` : '')],
    ['output tokens', count(usage.num_output_tokens)],
    ['workers', workers(request)],
  ];
  if (transfer) {
    pairs.push(['KV cache moved',
      `${bytes(transfer.num_bytes)} over ${transfer.backend}, ${plural(transfer.num_pieces, 'piece')} in ${seconds(transfer.push_s)}`]);
  }
  if (request.placement) pairs.push(['placed because', request.placement]);
  for (const failure of request.failures) pairs.push(['an attempt failed', failure]);
  return h('dl', { class: 'facts' }, ...pairs.map(([name, value], i) =>
    h('div', { class: i > 5 ? 'whole' : null }, h('dt', null, name), h('dd', null, value))));
}

function drawDetail(request) {
  const findings = request.findings.map((finding) => h('div', { class: 'found' },
    h('p', null, h('b', null, `${PHASES[finding.phase] ?? finding.phase} took ${seconds(finding.seconds)}`),
      finding.usual_s === null ? '' : ` (usual: ${seconds(finding.usual_s)})`, ` – ${finding.evidence}.`),
    h('p', { class: 'advice' }, finding.advice)));
  if (!findings.length && !isRunning(request)) {
    findings.push(h('p', { class: 'note' }, 'No phase stood out: it took what such requests usually take.'));
  }
  $('detail-body').replaceChildren(facts(request), ...findings, waterfall(request));
}

async function fetchDetail() {
  const id = shown;
  try {
    const request = await ask(`ui/requests/${encodeURIComponent(id)}`);
    if (shown !== id) return;
    drawDetail(request);
    if (!isRunning(request)) shown = null; // nothing changes any more
  } catch (error) {
    if (error instanceof Refused) throw error;
    if (shown !== id) return;
    const why = error instanceof Missing ? error.message : 'The router does not answer.';
    $('detail-body').replaceChildren(h('p', { class: 'note' }, why));
  }
}

function show(button) {
  shown = button.title;
  openedIn = button.closest('section');
  openedBy = button;
  tell($('detail-title'), shown);
  $('detail-body').replaceChildren(h('p', { class: 'note' }, 'Asking the router.'));
  $('detail').showModal();
  $('detail-title').focus();
  fetchDetail().catch(askForKey);
}

$('close').addEventListener('click', () => $('detail').close());
$('detail').addEventListener('click', (event) => {
  if (event.target === $('detail')) $('detail').close();
});
$('detail').addEventListener('close', () => {
  shown = null;
  if (openedBy && !openedBy.isConnected) openedIn.querySelector('h2').focus(); // its row went
});

// Up and down go from row to row.
document.addEventListener('keydown', (event) => {
  const step = { ArrowDown: 'nextElementSibling', ArrowUp: 'previousElementSibling' }[event.key];
  const row = step && event.target.closest?.('tbody tr');
  const next = row?.[step]?.querySelector('button');
  if (next) { event.preventDefault(); next.focus(); }
});

// ---- the clock

let timer = null;
let since = null;

function connected() {
  since = null;
  $('lost').hidden = true;
  $('main').classList.remove('stale');
  $('live').className = 'on';
  tell($('live'), 'live');
}

function disconnected() {
  since ??= new Date();
  const at = since.toLocaleTimeString();
  tell($('lost'), `The router has not answered since ${at}: what stands below is from then. Still trying.`);
  $('lost').hidden = false;
  $('main').classList.add('stale');
  $('live').className = 'off';
  tell($('live'), 'not connected');
}

function askForKey(error) {
  const wasShown = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  tell($('key-why'), wasShown ? `${error.message}.` : '');
  $('live').className = '';
  tell($('live'), 'waiting for a key');
  if ($('detail').open) $('detail').close();
  if (!$('key').open) $('key').showModal();
}

async function turn() {
  timer = null;
  if (document.hidden) return;
  try {
    draw(await ask('ui/state'));
    connected();
    if (shown !== null) await fetchDetail();
  } catch (error) {
    if (error instanceof Refused) { askForKey(error); return; }
    disconnected();
  }
  timer ??= setTimeout(turn, EVERY_MS);
}

$('key').querySelector('form').addEventListener('submit', (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $('key-input').value.trim());
  $('key-input').value = '';
  $('key').close();
});
$('key').addEventListener('close', () => {
  if (sessionStorage.getItem(KEY) !== null) turn();
  else {
    $('lost').replaceChildren('Nothing is shown without an admin key. ',
      h('button', { type: 'button', click: () => $('key').showModal() }, 'Enter a key'));
    $('lost').hidden = false;
  }
});
document.addEventListener('visibilitychange', () => {
  if (!document.hidden && timer === null && !$('key').open) turn();
});

$('legend').append(...Object.entries(PHASES).filter(([phase]) => phase !== 'unaccounted' && phase !== 'push')
  .map(([phase, name]) => h('li', null, swatch(phase), name)));
turn();
