/* Trained models of ListOps and of sentiment in plain JavaScript: CRvNN, and beam search (EBT-GRC).

`rvnnModels()` returns the functions; it refers to nothing outside itself, so that its text can be
sent to a Web Worker. Names and equations are those of rvnnbook.encoders.crvnn and
rvnnbook.encoders.efficient_beam; tests/test_browser_models.py compares the two. */
function rvnnModels() {
  "use strict";
  const OPERATORS = ["[MIN", "[MAX", "[MED", "[SM"], VOCABULARY = [...OPERATORS, ..."0123456789", "]"];
  // Left out: positions that exist less than GONE, neighbors of weight below STILL where states are averaged, and
  // compositions that arrive with probability below STILL. Scores are exponentiated, so GONE has to be far smaller.
  const GONE = 1e-12, STILL = 1e-6;

  // Expressions: the same checks and messages as rvnnbook.data.listops.
  class ListOpsError extends Error {
    constructor(message, token) { super(message); this.token = token; }
  }

  function quoted(word) {    // as Python's repr of a string
    const mark = word.includes("'") && !word.includes('"') ? '"' : "'";
    const escaped = [...word].map(char => {
      const code = char.codePointAt(0), hex = code.toString(16);
      if (char === "\\" || char === mark) return "\\" + char;
      if (!/[\p{C}\p{Z}]/u.test(char)) return char;
      return code < 256 ? "\\x" + hex.padStart(2, "0") : code < 65536 ? "\\u" + hex.padStart(4, "0") : "\\U" + hex.padStart(8, "0");
    });
    return mark + escaped.join("") + mark;
  }

  function tokenize(text) {    // -> [{text, start, end}], parentheses left out
    const words = text.matchAll(/[^\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/g);
    const tokens = [...words].filter(([word]) => word !== "(" && word !== ")")
      .map(word => ({text: word[0], start: word.index, end: word.index + word[0].length}));
    tokens.forEach((token, i) => {
      if (!VOCABULARY.includes(token.text))
        throw new ListOpsError(`token ${i} is ${quoted([...token.text].slice(0, 20).join(""))}, which is none of ${VOCABULARY.join(" ")}`, token);
    });
    return tokens;
  }

  function apply(operator, values) {
    const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
    if (operator === "[MIN") return sorted[0];
    if (operator === "[MAX") return sorted[sorted.length - 1];
    if (operator === "[SM") return values.reduce((a, b) => a + b) % 10;
    return sorted.length % 2 ? sorted[half] : sorted[half - 1] + sorted[half] >> 1;
  }

  function parse(text) {    // -> {words, value, spans of sub-expressions (first, last)}
    const tokens = tokenize(text), open = [], spans = [];
    let value = null, ended = false;
    tokens.forEach((token, i) => {
      const word = token.text;
      if (ended) throw new ListOpsError(`token ${i}, ${word}, stands after the end of the expression`, token);
      if (OPERATORS.includes(word)) return void open.push({i, values: []});
      if (word !== "]") value = Number(word);
      else if (!open.length) throw new ListOpsError(`token ${i}, ], closes no operator`, token);
      else {
        const {i: start, values} = open.pop();
        if (!values.length) throw new ListOpsError(`token ${start}, ${tokens[start].text}, has no argument`, tokens[start]);
        value = apply(tokens[start].text, values);
        spans.push([start, i]);
      }
      if (open.length) open[open.length - 1].values.push(value); else ended = true;
    });
    if (open.length) {
      const {i} = open.pop();
      throw new ListOpsError(`token ${i}, ${tokens[i].text}, is never closed`, tokens[i]);
    }
    if (!ended) throw new ListOpsError("the expression is empty");
    return {words: tokens.map(token => token.text), value, spans};
  }

  function drawExpression(random = Math.random, fewest = 8, most = 60) {    // as draw_expression, within bounds
    for (;;) {
      const words = [], missing = [1];
      while (missing.length && words.length <= most) {
        if (!missing[missing.length - 1]) {
          missing.pop();
          if (missing.length) words.push("]");
          continue;
        }
        missing[missing.length - 1]--;
        if (missing.length < 20 && random() < .25) {
          words.push(OPERATORS[Math.floor(4 * random())]);
          missing.push(2 + Math.floor(4 * random()));
        } else words.push(String(Math.floor(10 * random())));
      }
      if (words.length >= fewest && words.length <= most) return words.join(" ");
    }
  }

  // Sentences: tokens as in the treebank of the models' vocabulary, which is lower-case; the others are unknown words.
  function readSentence(text, vocabulary) {    // -> {words, unknown}
    const known = new Set(vocabulary), curly = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2026": "..."};
    const chunks = text.toLowerCase().replace(/[\u2018\u2019\u201c\u201d\u2026]/g, mark => curly[mark]).split(/\s+/).filter(Boolean);
    const words = chunks.flatMap(chunk => known.has(chunk) ? [chunk] : chunk.replace(/(\w)(n't|'(?:s|re|ve|ll|d|m))(?!\w)/g, "$1 $2 ")
      .match(/n't|'(?:s|re|ve|ll|d|m)(?!\w)|\.\.\.|--|[\p{L}\p{N}]+(?:[-./&][\p{L}\p{N}]+)*|[^\s]/gu));
    if (!words.length) throw new Error("the sentence is empty");
    return {words, unknown: words.filter(word => !known.has(word))};
  }

  // Weights: safetensors, half or single precision.
  function half(bits) {
    const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
  }

  function readWeights(bytes) {    // Uint8Array -> {about, tensors: {name: {shape, values}}}
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength), start = 8 + view.getUint32(0, true);
    const {__metadata__: about, ...entries} = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
    const tensors = {};
    for (const [name, {dtype, shape, data_offsets: [from, to]}] of Object.entries(entries)) {
      const width = {F16: 2, F32: 4}[dtype];
      if (!width) throw new Error(`tensor ${name} has type ${dtype}; F16 and F32 can be read`);
      const values = new Float32Array((to - from) / width);
      for (let i = 0; i < values.length; i++) {
        const at = start + from + i * width;
        values[i] = width === 2 ? half(view.getUint16(at, true)) : view.getFloat32(at, true);
      }
      tensors[name] = {shape, values};
    }
    const vocabulary = about.vocabulary ? JSON.parse(about.vocabulary) : VOCABULARY;    // the first of a given one stands for unknown words
    return {about, options: JSON.parse(about.options), tensors, vocabulary, index: new Map(vocabulary.map((word, i) => [word, i]))};
  }

  // Layers on rows: x holds `rows` vectors one after the other.
  function linear(weight, bias, x, rows) {    // every sum in the order of i, so that equal rows have equal results
    const [outs, ins] = weight.shape, w = weight.values, y = new Float64Array(rows * outs);
    let r = 0;
    for (; r + 4 <= rows; r += 4)
      for (let o = 0; o < outs; o += 2) {
        const two = o + 1 < outs, q = two ? (o + 1) * ins : o * ins, to = r * outs + o, k = r * ins;
        let a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
        for (let i = 0, p = o * ins; i < ins; i++) {
          const u = w[p + i], v = w[q + i], x0 = x[k + i], x1 = x[k + ins + i], x2 = x[k + 2 * ins + i], x3 = x[k + 3 * ins + i];
          a += u * x0; b += u * x1; c += u * x2; d += u * x3;
          e += v * x0; f += v * x1; g += v * x2; h += v * x3;
        }
        y[to] = a; y[to + outs] = b; y[to + 2 * outs] = c; y[to + 3 * outs] = d;
        if (two) { y[to + 1] = e; y[to + outs + 1] = f; y[to + 2 * outs + 1] = g; y[to + 3 * outs + 1] = h; }
      }
    for (; r < rows; r++)
      for (let o = 0; o < outs; o += 4) {
        const k = r * ins, p = o * ins, q = Math.min(o + 1, outs - 1) * ins, s = Math.min(o + 2, outs - 1) * ins, t = Math.min(o + 3, outs - 1) * ins;
        let a = 0, b = 0, c = 0, d = 0;
        for (let i = 0; i < ins; i++) {
          const v = x[k + i];
          a += w[p + i] * v; b += w[q + i] * v; c += w[s + i] * v; d += w[t + i] * v;
        }
        y.set([a, b, c, d].slice(0, outs - o), r * outs + o);
      }
    if (bias) for (let i = 0; i < y.length; i++) y[i] += bias.values[i % outs];
    return y;
  }

  function layerNorm(gain, shift, x, rows) {    // in place
    const dim = gain.shape[0];
    for (let r = 0; r < rows; r++) {
      let mean = 0, square = 0;
      for (let d = 0; d < dim; d++) mean += x[r * dim + d] / dim;
      for (let d = 0; d < dim; d++) square += (x[r * dim + d] - mean) ** 2 / dim;
      const scale = 1 / Math.sqrt(square + 1e-5);
      for (let d = 0; d < dim; d++) x[r * dim + d] = (x[r * dim + d] - mean) * scale * gain.values[d] + shift.values[d];
    }
    return x;
  }

  // erf on a grid of 1/256 by Simpson's rule; between, three terms of its Taylor series.
  const GRID = 256, density = x => 2 / Math.sqrt(Math.PI) * Math.exp(-x * x), erfs = new Float64Array(6 * GRID + 1);
  for (let i = 0; i < 6 * GRID; i++)
    erfs[i + 1] = erfs[i] + (density(i / GRID) + 4 * density((i + .5) / GRID) + density((i + 1) / GRID)) / (6 * GRID);
  const derivatives = erfs.map((_, i) => density(i / GRID));

  function gelu(x) {
    const z = Math.abs(x) * Math.SQRT1_2;
    if (z >= 6) return x > 0 ? x : 0;
    const i = Math.round(z * GRID), at = i / GRID, d = z - at;
    const erf = erfs[i] + derivatives[i] * d * (1 - d * (at - d * (2 * at * at - 1) / 3));
    return x > 0 ? x * (1 + erf) / 2 : x * (1 - erf) / 2;
  }

  const sigmoid = x => 1 / (1 + Math.exp(-x));

  function softmax(scores) {
    const top = Math.max(...scores), powers = scores.map(score => Math.exp(score - top));
    const total = powers.reduce((a, b) => a + b, 0);
    return powers.map(power => power / total);
  }

  function compose({tensors: t}, below, rows) {    // GRC: rows of both children -> rows of parents
    const dim = t["encoder.grc.norm.weight"].shape[0];
    const hidden = linear(t["encoder.grc.w1.weight"], t["encoder.grc.w1.bias"], below, rows).map(gelu);
    const parts = linear(t["encoder.grc.w2.weight"], t["encoder.grc.w2.bias"], hidden, rows), parents = new Float64Array(rows * dim);
    for (let r = 0; r < rows; r++)
      for (let d = 0; d < dim; d++) {
        const z = r * 4 * dim + d, x = r * 2 * dim + d;
        parents[r * dim + d] = sigmoid(parts[z]) * below[x] + sigmoid(parts[z + dim]) * below[x + dim] + sigmoid(parts[z + 2 * dim]) * parts[z + 3 * dim];
      }
    return layerNorm(t["encoder.grc.norm.weight"], t["encoder.grc.norm.bias"], parents, rows);
  }

  function leaves({tensors: t, index}, words, around = []) {    // states of START, tokens, END
    const dim = t["in_proj.bias"].shape[0], table = t["embedding.weight"].values, vectors = new Float64Array(dim * words.length);
    words.map(word => index.get(word) ?? 0).forEach((row, i) => vectors.set(table.subarray(dim * row, dim * row + dim), i * dim));
    const tokens = linear(t["in_proj.weight"], t["in_proj.bias"], vectors, words.length), rows = words.length + around.length;
    const framed = new Float64Array(dim * rows);
    framed.set(tokens, around.length ? dim : 0);
    around.forEach((name, i) => framed.set(t[name].values, i * dim * (rows - 1)));
    return layerNorm(t["encoder.leaf_norm.weight"], t["encoder.leaf_norm.bias"],
      linear(t["encoder.leaf.weight"], t["encoder.leaf.bias"], framed, rows), rows);
  }

  function readHead({tensors: t}, root) {
    const layer = (number, x) => linear(t[`head.${number}.weight`], t[`head.${number}.bias`], x, 1);
    const probabilities = softmax([...("head.1.weight" in t ? layer(1, layer(0, root).map(gelu)) : layer(0, root))]);
    return {probabilities, value: probabilities.indexOf(Math.max(...probabilities))};
  }

  // CRvNN
  function neighbors(exists, alive, side) {    // crvnn Eq. 5, the weights that are not 0: place -> [place, weight] pairs
    const found = new Map();
    alive.forEach((place, at) => {
      const pairs = [];
      for (let free = 1, a = at + side; free > GONE && a >= 0 && a < alive.length; a += side) {
        const weight = Math.min(exists[alive[a]], free);
        pairs.push([alive[a], weight]);
        free -= weight;
      }
      found.set(place, pairs);
    });
    return found;
  }

  const near = found => new Map([...found].map(([place, pairs]) => [place, pairs.filter(([, weight]) => weight > STILL)]));

  function retrieve(pairs, values, dim, out) {    // add expected values at neighbors to out
    for (const [place, weight] of pairs)
      for (let d = 0; d < dim; d++) out[d] += weight * values[place * dim + d];
    return out;
  }

  function splitScorer(model) {    // first layer of the scorer by what it reads
    const {tensors: t} = model, {shape: [outs, ins], values} = t["encoder.scorer.0.weight"];
    const dim = t["encoder.start"].shape[0], window = 2, parts = 2 * window + 1;
    const states = {shape: [parts * outs, dim], values: new Float32Array(parts * outs * dim)};
    for (let part = 0; part < parts; part++)
      for (let o = 0; o < outs; o++)
        states.values.set(values.subarray(o * ins + part * dim, o * ins + part * dim + dim), (part * outs + o) * dim);
    const wide = ins - parts * dim, rest = {shape: [outs, wide], values: new Float32Array(outs * wide)};
    for (let o = 0; o < outs; o++) rest.values.set(values.subarray((o + 1) * ins - wide, (o + 1) * ins), o * wide);
    const no = linear(rest, t["encoder.scorer.0.bias"], t["encoder.transition.not_composed"].values, 1);
    const yes = linear(rest, t["encoder.scorer.0.bias"], t["encoder.transition.composed"].values, 1);
    return {states, parts, outs, no, change: yes.map((v, i) => v - no[i])};
  }

  function scoreOf(scorer, t, place, {left, right, once, seen}, arrived) {    // u of one position
    const {outs, parts, no, change} = scorer, sum = no.map((v, i) => v + arrived * change[i]);
    const slice = part => seen.subarray(part * once.width, (part + 1) * once.width);
    retrieve(left.get(place), once.left, outs, sum);
    retrieve(left.get(place), slice(1), outs, sum);
    retrieve([[place, 1]], slice(2), outs, sum);
    retrieve(right.get(place), slice(3), outs, sum);
    retrieve(right.get(place), once.right, outs, sum);
    return linear(t["encoder.scorer.1.weight"], t["encoder.scorer.1.bias"], sum.map(gelu), 1)[0];
  }

  function scoreAll(scorer, t, alive, last, seen, left, right, arrived) {    // u, -Infinity where composition is not allowed
    const {outs} = scorer, total = arrived.length, width = total * outs;
    const once = {width, left: new Float64Array(width), right: new Float64Array(width)};
    for (const place of alive) {
      retrieve(left.get(place), seen.subarray(0, width), outs, once.left.subarray(place * outs, (place + 1) * outs));
      retrieve(right.get(place), seen.subarray(4 * width), outs, once.right.subarray(place * outs, (place + 1) * outs));
    }
    const scores = new Float64Array(total).fill(-Infinity);
    for (const place of alive)
      if (place > 0 && place < last) scores[place] = scoreOf(scorer, t, place, {left, right, once, seen}, arrived[place]);
    return scores;
  }

  function compete(modulation, scores, place, ...sides) {    // c: crvnn Eq. 13, or with expected exponentials
    const mine = scores[place], pairs = sides.flat();
    if (mine === -Infinity) return 0;
    const expected = side => side.reduce((sum, [at, weight]) => sum + (scores[at] === -Infinity ? 0 : weight * scores[at]), 0);
    if (modulation === "scores") return softmax([mine, ...sides.map(expected), 0])[0];
    if (modulation !== "exponentials") throw new Error(`modulation ${modulation} is not available in the page`);
    const top = Math.max(0, mine, ...pairs.map(([at]) => scores[at]));
    const rivals = pairs.reduce((sum, [at, weight]) => sum + weight * Math.exp(scores[at] - top), 0);
    return Math.exp(mine - top) / (Math.exp(mine - top) + Math.exp(-top) + rivals);
  }

  function extractTree(composition, count) {    // composition steps: a position is merged when its sum reaches 0.5
    const rounds = new Array(count).fill(0), sums = new Array(count).fill(0);
    for (const c of composition) for (let i = 0; i < count; i++) rounds[i] += (sums[i] += c[i]) < .5;
    const steps = new Array(count).fill(0), heights = new Array(count).fill(0);
    const right = steps.map((_, i) => i + 1), left = steps.map((_, i) => i - 1);
    const order = [...steps.keys()].slice(0, count - 1).sort((a, b) => rounds[a] - rounds[b] || a - b);
    for (const i of order) {
      steps[i] = heights[right[i]] = 1 + Math.max(heights[i], heights[right[i]]);
      left[right[i]] = left[i];
      if (left[i] >= 0) right[left[i]] = right[i];
    }
    return steps;
  }

  function runCrvnn(model, words) {
    const {tensors: t, options} = model, turned = options.root === "first", threshold = options.threshold ?? .01;
    const dim = t["encoder.start"].shape[0], last = words.length, total = last + 2, scorer = model.scorer ??= splitScorer(model);
    const states = leaves(model, turned ? [...words].reverse() : words, ["encoder.start", "encoder.end"]);
    const exists = new Float64Array(total).fill(1), existence = [], composition = [];
    const seen = new Float64Array(scorer.parts * total * scorer.outs);
    let arrived = new Float64Array(total), changed = [...exists.keys()];
    const inner = values => (turned ? [...values.slice(1, -1)].reverse() : [...values.slice(1, -1)]), raw = [];
    for (let round = 0; ; round++) {
      existence.push(inner(exists));
      if (round >= last - 1 || exists.slice(1, -1).filter(e => e >= threshold).length <= 1) break;
      const project = linear(scorer.states, null, gather(states, changed, dim), changed.length), {outs, parts} = scorer;
      changed.forEach((place, r) => {
        for (let part = 0; part < parts; part++)
          seen.set(project.subarray((r * parts + part) * outs, (r * parts + part + 1) * outs), (part * total + place) * outs);
      });
      const alive = [...exists.keys()].filter(place => exists[place] > GONE);
      const left = neighbors(exists, alive, -1), right = neighbors(exists, alive, 1);
      const nearLeft = near(left), scores = scoreAll(scorer, t, alive, last, seen, nearLeft, near(right), arrived), composes = new Float64Array(total);
      for (const place of alive) composes[place] = compete(options.modulation ?? "scores", scores, place, left.get(place), right.get(place));
      arrived = new Float64Array(total);
      for (const place of alive) retrieve(left.get(place), composes, 1, arrived.subarray(place, place + 1));
      changed = alive.filter(place => place > 1 && place <= last && arrived[place] > STILL);
      const below = new Float64Array(changed.length * 2 * dim);
      changed.forEach((place, r) => {
        retrieve(nearLeft.get(place), states, dim, below.subarray(2 * r * dim, (2 * r + 1) * dim));
        below.set(states.subarray(place * dim, (place + 1) * dim), (2 * r + 1) * dim);
      });
      const parents = compose(model, below, changed.length);
      changed.forEach((place, r) => {
        for (let d = 0; d < dim; d++) states[place * dim + d] += arrived[place] * (parents[r * dim + d] - states[place * dim + d]);
      });
      for (const place of alive) exists[place] *= 1 - composes[place];
      raw.push(composes.slice(1, -1));
      composition.push(inner(composes));
    }
    let steps = extractTree(raw, last);
    if (turned) steps = [...steps.slice(0, -1).reverse(), 0];
    return {...readHead(model, states.slice(last * dim, (last + 1) * dim)), rounds: composition.length, existence, composition, steps, turned};
  }

  function gather(values, places, dim) {
    const rows = new Float64Array(places.length * dim);
    places.forEach((place, r) => rows.set(values.subarray(place * dim, (place + 1) * dim), r * dim));
    return rows;
  }

  // Beam search: equal nodes and equal pairs are computed once.
  function nodeStore(model, words) {
    const {tensors: t} = model, dim = t["in_proj.bias"].shape[0], width = t["encoder.scorer.0.bias"].shape[0];
    const kinds = [...new Set(words)], states = [], made = new Map(), pairs = new Map(), first = t["encoder.scorer.0.weight"].values;
    const halves = [0, 1].map(side => {
      const part = {shape: [width, width], values: new Float32Array(width * width)};
      for (let o = 0; o < width; o++) part.values.set(first.subarray((2 * o + side) * width, (2 * o + side + 1) * width), o * width);
      return part;
    });
    const add = state => states.push({state, halves: halves.map((part, side) => linear(part, side ? null : t["encoder.scorer.0.bias"], state, 1))}) - 1;
    const rows = leaves(model, kinds);
    kinds.forEach((_, i) => add(rows.slice(i * dim, (i + 1) * dim)));
    return {
      row: words.map(word => kinds.indexOf(word)),
      state: node => states[node].state,
      score(left, right) {
        const key = left * 65536 + right;
        if (!pairs.has(key)) {
          const sum = states[left].halves[0].map((v, i) => gelu(v + states[right].halves[1][i]));
          pairs.set(key, linear(t["encoder.scorer.1.weight"], t["encoder.scorer.1.bias"], sum, 1)[0]);
        }
        return pairs.get(key);
      },
      parent(left, right) {
        const key = left * 65536 + right, below = new Float64Array(2 * dim);
        if (!made.has(key)) {
          below.set(states[left].state);
          below.set(states[right].state, dim);
          made.set(key, add(compose(model, below, 1)));
        }
        return made.get(key);
      },
    };
  }

  function best(items, count, score) {    // the greatest; of equals the first
    return [...items.keys()].sort((a, b) => score(items[b]) - score(items[a]) || a - b).slice(0, count).map(i => items[i]);
  }

  function proposals(hypothesis, from, beam) {    // its best pairs, with log-probabilities
    const {logits, score} = hypothesis, top = Math.max(...logits);
    const norm = top + Math.log(logits.reduce((sum, u) => sum + Math.exp(u - top), 0));
    return best(logits.map((u, pick) => ({from, pick, score: score + u - norm, u})), beam, one => one.u);
  }

  function merge(store, hypothesis, {from, pick, score}) {    // replace a pair by its parent
    const nodes = [...hypothesis.nodes], logits = [...hypothesis.logits], ends = [...hypothesis.ends], heights = [...hypothesis.heights];
    const steps = [...hypothesis.steps], height = 1 + Math.max(heights[pick], heights[pick + 1]);
    steps[ends[pick]] = height;
    nodes.splice(pick, 2, store.parent(nodes[pick], nodes[pick + 1]));
    heights.splice(pick, 2, height);
    ends.splice(pick, 1);
    logits.splice(pick, 1);
    if (pick > 0) logits[pick - 1] = store.score(nodes[pick - 1], nodes[pick]);
    if (pick < nodes.length - 1) logits[pick] = store.score(nodes[pick], nodes[pick + 1]);
    return {nodes, logits, ends, heights, steps, score, from, pick};
  }

  function runBeam(model, words, beam = 5) {
    const store = nodeStore(model, words), row = store.row, zeros = row.map(() => 0);
    let beams = [{nodes: row, ends: [...row.keys()], heights: zeros, steps: zeros, score: 0, from: 0, pick: null,
      logits: row.slice(1).map((right, i) => store.score(row[i], right))}];
    const lattice = [];
    for (let step = 1; step < words.length; step++) {
      const found = beams.flatMap((hypothesis, from) => proposals(hypothesis, from, beam));
      beams = best(found, beam, one => one.score).map(one => merge(store, beams[one.from], one));
      lattice.push(beams.map(({from, pick, score, ends}) => ({from, pick, score, at: ends[pick]})));
    }
    const weights = softmax(beams.map(({score}) => score)), root = new Float64Array(store.state(0).length);
    beams.forEach(({nodes}, k) => store.state(nodes[0]).forEach((v, d) => { root[d] += weights[k] * v; }));
    const hypotheses = beams.map(({nodes, steps, score}, k) => {
      const {value, probabilities} = readHead(model, store.state(nodes[0]));
      return {steps, score, weight: weights[k], value, probability: probabilities[value]};
    });
    return {...readHead(model, root), hypotheses, lattice, rounds: lattice.length, steps: best(hypotheses, 1, one => one.weight)[0].steps};
  }

  function run(model, words, beam) {
    const began = Date.now(), result = model.about.encoder === "crvnn" ? runCrvnn(model, words) : runBeam(model, words, beam);
    return {...result, milliseconds: Date.now() - began};
  }

  function treeSpans(steps) {    // (first, middle, last, round) of every parent, as rvnnbook.show.trees.tree_spans
    const n = steps.length, first = [...steps.keys()], right = first.map(i => i + 1), parents = [];
    const order = [...first.slice(0, n - 1)].sort((a, b) => steps[a] - steps[b] || a - b);
    for (const sender of order) {
      const step = steps[sender];
      let receiver = right[sender];
      while (receiver < n - 1 && steps[receiver] < step) receiver = right[receiver];
      right[sender] = receiver;
      parents.push([first[sender], sender, receiver, step]);
      first[receiver] = first[sender];
    }
    return parents;
  }

  return {parse, readSentence, drawExpression, readWeights, run, treeSpans, VOCABULARY};
}
