// The planner of `ess plan`, on numbers that it has simulated: capacity is its arithmetic again,
// times are read between the points of a grid. Context and slots are read on a logarithmic scale.

function between(axis, value, scale) {
  const at = Math.min(Math.max(value, axis[0]), axis[axis.length - 1]);
  let right = axis.findIndex((size) => size >= at);
  if (right === 0) right = 1;
  const low = scale(axis[right - 1]), high = scale(axis[right]);
  return [right - 1, (scale(at) - low) / (high - low)];
}

function mix(low, high, share) { return low + share * (high - low); }

function stepTime(numbers, ask, batch) {
  const grid = numbers.step_us[numbers.mtps.indexOf(ask.mtp)];
  const [c, cs] = between(numbers.contexts, ask.context, Math.log);
  const [b, bs] = between(numbers.batches, batch, (x) => x);
  const at = (i) => mix(grid[i][b], grid[i][b + 1], bs);
  return mix(at(c), at(c + 1), cs);
}

function exposedTime(numbers, ask, batch, slots) {
  if (slots >= ask.context) return 0;
  const grid = numbers.exposed_us[numbers.mtps.indexOf(ask.mtp)];
  const [c, cs] = between(numbers.contexts, ask.context, Math.log);
  const [b, bs] = between(numbers.batches, batch, (x) => x);
  const [s, ss] = between(numbers.slots, slots, Math.log);
  const line = (i, j) => mix(grid[i][j][s], grid[i][j][s + 1], ss);
  const at = (i) => mix(line(i, b), line(i, b + 1), bs);
  return Math.max(0, mix(at(c), at(c + 1), cs));
}

// The point's decode GPU with the prefill GPUs that feed it, as `ess.sim.planning.deployment`.
function withPrefill(numbers, ask, point) {
  const prompt = ask.context - ask.out, pages = (tokens) => Math.floor(tokens / 64) * 64;
  const cached = Math.min(pages(Math.floor(ask.cached * prompt)), pages(prompt - 1));
  const computed = prompt - 1 - cached, time = numbers.prefill;
  const seconds = computed * (time.quadratic * (computed + 2 * cached) + time.linear);
  const landed = time.nic_bytes_per_s / (Math.max(1, computed) * numbers.host_page_bytes / 64);
  const ended = Math.min(point.tokens_per_s / ask.out, landed), gpus = ended * seconds;
  return { ...point, prefill_gpus: gpus, shared_tokens_per_s: ended * ask.out / (1 + gpus) };
}

function plan(numbers, ask) {
  const whole = (n) => Number.isInteger(n) && n >= 1;
  if (!whole(ask.context) || (ask.batch !== null && !whole(ask.batch))) {
    return { refused: "the context and the batch are whole numbers, 1 or more" };
  }
  const [shortest, longest] = [numbers.contexts[0], numbers.contexts[numbers.contexts.length - 1]];
  if (ask.context < shortest || ask.context > longest) {
    return { refused: `this page knows contexts from ${shortest} to ${longest} tokens` };
  }
  if (!whole(ask.out) || ask.out >= ask.context || !(ask.cached >= 0 && ask.cached <= 1)) {
    return { refused: "an output takes part of the context, and 0 to 1 of the prompt is cached" };
  }
  const accepted = ask.accepted ??
    Array.from({ length: ask.mtp }, (_, draft) => 0.7 ** draft).reduce((a, b) => a + b, 0);
  if (!(accepted >= 1 && accepted <= ask.mtp)) {
    return { refused: `between 1 and ${ask.mtp} tokens are accepted per step` };
  }
  const pages = Math.ceil(ask.context / 64), index = pages * numbers.index_page_bytes;
  const slotsEach = (batch) => Math.min(ask.context, Math.floor(Math.floor(
    Math.max(0, ask.device_bytes - batch * index) / numbers.slot_bytes) / batch));
  const hostMost = ask.host_bytes === null ? Infinity : Math.floor(
    Math.floor(ask.host_bytes / numbers.gpus / numbers.host_page_bytes) / pages);
  const deviceMost = (slots) => Math.floor(ask.device_bytes / (index + slots * numbers.slot_bytes));
  const point = (batch, slots) => {
    const exposed_us = exposedTime(numbers, ask, batch, slots);
    const step_us = stepTime(numbers, ask, batch) + exposed_us;
    return { batch, slots, exposed_us, step_us, token_us: step_us / accepted,
      tokens_per_s: batch * accepted / step_us * 1e6,
      host_bytes: batch * pages * numbers.host_page_bytes };
  };
  const floor = Math.min(ask.context, Math.max(numbers.slot_floor, ask.mtp * numbers.top_k));
  const floorBatch = deviceMost(floor), most = Math.min(floorBatch, hostMost);
  const asked = ask.batch ?? most;
  if (most < 1 || asked > most) {
    return { refused: `a batch of ${Math.max(asked, 1)} does not fit: at ${floor} slots a layer ` +
      `the ${hostMost < floorBatch ? "host" : "device"} holds ${most}` };
  }
  const upTo = (count) => Array.from({ length: count }, (_, i) => i + 1);
  const points = upTo(most).map((batch) => point(batch, slotsEach(batch)));
  const wholes = upTo(deviceMost(ask.context))
    .map((batch) => ({ ...point(batch, ask.context), host_bytes: 0 }));
  const inTime = (some) => ask.tpot_us === null || some.token_us <= ask.tpot_us;
  const best = (some) => some.filter(inTime).reduce(
    (a, b) => a === null || b.tokens_per_s > a.tokens_per_s ? b : a, null);
  const counted = (some) => some === null ? null : withPrefill(numbers, ask, some);
  const chosen = counted(best(ask.batch === null ? points : [points[ask.batch - 1]]));
  if (chosen === null) {
    const fastest = Math.min(...points.map((some) => some.token_us)) / 1000;
    return { refused: `${ask.tpot_us / 1000} ms a token is out of reach: the fastest batch takes ` +
      `${fastest.toFixed(1)} ms` };
  }
  const next = points[chosen.batch];
  const limiter = ask.batch !== null ? "the batch asked for"
    : next === undefined ? (hostMost < floorBatch ? "host pages" : "slots")
    : !inTime(next) ? "time per token"
    : next.exposed_us > 0.05 * next.step_us ? "host link" : "compute";
  const resident = counted(best(wholes));
  const gain = resident === null ? null : chosen.tokens_per_s / resident.tokens_per_s;
  return { context: ask.context, accepted, floor, chosen, resident, points, wholes, limiter, gain,
    recommended: gain === null || gain >= numbers.worth ? "offload" : "resident",
    group: numbers.prefill.group_gpus, floor_batch: floorBatch, index_wall: deviceMost(0), refused: null };
}
