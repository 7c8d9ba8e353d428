/* Players that run a trained model on an expression that the reader gives. Needs models.js and player.js; works from the disk. */
(() => {
  "use strict";
  const MOST = 300, folder = document.currentScript.src.replace(/play\.js.*$/, ""), local = rvnnModels();
  const element = rvnnElement;

  // Weights come as scripts, because a page opened from the disk may not fetch files.
  const waiting = {}, loaded = {};
  window.rvnnWeights = (name, text) => waiting[name].resolve(Uint8Array.from(atob(text), char => char.charCodeAt(0)));

  function loadWeights(name) {
    return loaded[name] ??= new Promise((resolve, reject) => {
      waiting[name] = {resolve};
      const script = document.createElement("script");
      script.src = `${folder}weights/${name}.js`;
      script.onerror = () => { delete loaded[name]; reject(new Error(`the weights ${name} could not be loaded`)); };
      document.head.append(script);
    });
  }

  // Work is done in a Web Worker made from the text of rvnnModels, or in the page where there is none.
  const models = {}, jobs = new Map();
  let worker = null, number = 0;

  function workerMain(api) {
    const held = {};
    self.onmessage = ({data: {id, name, bytes, words, beam}}) => {
      if (bytes) return void (held[name] = api.readWeights(bytes));
      try { self.postMessage({id, result: api.run(held[name], words, beam)}); }
      catch (error) { self.postMessage({id, error: error.message}); }
    };
  }

  function startWorker() {
    try {
      const text = `(${workerMain})((${rvnnModels})());`;
      worker = new Worker(URL.createObjectURL(new Blob([text], {type: "text/javascript"})));
      worker.onmessage = ({data: {id, result, error}}) => {
        const job = jobs.get(id);
        jobs.delete(id);
        if (error) job.reject(new Error(error)); else job.resolve(result);
      };
      worker.onerror = event => {    // refused: do the open jobs here
        event.preventDefault();
        worker = false;
        for (const job of jobs.values()) runHere(job.name, job.words, job.beam).then(job.resolve, job.reject);
        jobs.clear();
      };
    } catch { worker = false; }
  }

  const modelHere = async name => models[name] ??= local.readWeights(await loadWeights(name));
  const runHere = async (name, words, beam) => local.run(await modelHere(name), words, beam);

  const sent = new Set();
  async function run(name, words, beam) {
    const bytes = await loadWeights(name);
    if (worker === null) startWorker();
    if (!worker) return runHere(name, words, beam);
    if (!sent.has(name)) { sent.add(name); worker.postMessage({name, bytes}); }
    return new Promise((resolve, reject) => {
      jobs.set(++number, {resolve, reject, name, words, beam});
      worker.postMessage({id: number, name, words, beam});
    });
  }

  // Drawing
  const escape = text => String(text).replace(/[&<>"]/g, char => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[char]);
  const svg = (width, height, label, marks) => `<svg viewBox="0 0 ${Math.ceil(width)} ${Math.ceil(height)}" role="img" aria-label="${escape(label)}" ` +
    `style="display:block;width:${Math.ceil(width)}px;height:auto;margin:auto" font-size="15" text-anchor="middle" fill="currentColor">${marks.join("")}</svg>`;

  function tokenPlaces(words) {    // centre of each token, and the width of all
    let at = 34;
    const centres = words.map(word => { const wide = Math.max(30, 9 * word.length + 14); at += wide; return at - wide / 2; });
    return {centres, width: at + 8};
  }

  function elbow(x, y, u, v) {    // an edge from a parent to its child, as rvnnbook.show.trees.elbow
    const bend = Math.min(6, Math.abs(u - x), v - y), at = number => number.toFixed(1);
    return `M${at(x)} ${at(y)}H${at(u - Math.sign(u - x) * bend)}Q${at(u)} ${at(y)} ${at(u)} ${at(y + bend)}V${at(v)}`;
  }

  function treeMarks(words, centres, parents, deepest) {    // parents: [first, middle, last, round, class], children first
    const row = Math.max(10, Math.min(34, 240 / Math.max(deepest, 1))), base = 38 + row * deepest, marks = [];
    const places = new Map(words.map((_, i) => [`${i},${i}`, [centres[i], base]]));
    for (const [first, middle, last, round, name] of parents) {
      const children = [`${first},${middle}`, `${middle + 1},${last}`].map(key => places.get(key));
      const x = (children[0][0] + children[1][0]) / 2, y = base - 14 - row * round;
      places.set(`${first},${last}`, [x, y]);
      if (!name) continue;
      for (const child of children) marks.push(`<path class="edge ${name}" d="${elbow(x, y, child[0], child[1] - (child[1] === base ? 14 : 0))}"/>`);
      marks.push(`<circle class="parent ${name}" cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="3.5"/>`);
    }
    words.forEach((word, i) => marks.push(`<text class="leaf" x="${centres[i].toFixed(1)}" y="${base + 5}">${escape(word)}</text>`));
    return {marks, base};
  }

  function drawRounds({words}, result, step) {    // CRvNN: tree so far, existence and composition, all rounds below
    const {centres, width} = tokenPlaces(words), {existence, composition, steps, turned, rounds} = result;
    const sums = upto => words.map((_, i) => composition.slice(0, upto).reduce((sum, c) => sum + c[i], 0));
    const [before, after] = [sums(step - 1), sums(step)];
    const parents = local.treeSpans(steps).map(([first, middle, last, height]) => {
      const at = middle + (turned ? 1 : 0);
      return [first, middle, last, height, after[at] < .5 ? "" : before[at] < .5 && step ? "new" : "old"];
    });
    const {marks, base} = treeMarks(words, centres, parents, Math.max(...steps));
    const e = existence[step], c = step ? composition[step - 1].map((value, i) => value * existence[step - 1][i]) : words.map(() => 0);
    [["e", e, 34], ["c", c, 76]].forEach(([name, values, top]) => {
      marks.push(`<text x="14" y="${base + top + 15}" font-size="13">${name}</text>`);
      values.forEach((value, i) => {
        const full = 22 * Math.min(1, value), x = centres[i] - 8;
        marks.push(`<rect class="level ${name}" x="${x.toFixed(1)}" y="${(base + top + 22 - full).toFixed(1)}" width="16" height="${full.toFixed(1)}"/>`,
          `<rect class="outline" x="${x.toFixed(1)}" y="${base + top}" width="16" height="22"/>`,
          `<text x="${centres[i].toFixed(1)}" y="${base + top + 34}" font-size="11">${value < .005 ? "0" : value > .995 ? "1" : value.toFixed(2).slice(1)}</text>`);
      });
    });
    const top = base + 124, row = Math.max(4, Math.min(12, 160 / (rounds + 1)));
    existence.forEach((values, round) => values.forEach((value, i) => {
      if (value >= .01) marks.push(`<rect class="level e" x="${(centres[i] - 12).toFixed(1)}" y="${(top + row * round).toFixed(1)}" width="24" height="${(row - 1).toFixed(1)}" fill-opacity="${Math.min(1, value).toFixed(2)}"/>`);
    }));
    marks.push(`<path class="now" d="M18 ${(top + row * (step + .5) - 5).toFixed(1)}l9 5l-9 5z"/>`);
    const left = words.filter((_, i) => e[i] >= .5), done = parents.filter(parent => parent[4]).length;
    return svg(width, top + row * (rounds + 1) + 6, `${done} of ${parents.length} parents are composed; ${left.length} of ${words.length} positions exist: ${left.slice(0, 12).join(" ")}${left.length > 12 ? " and more" : ""}.`, marks);
  }

  function replay(picks, count) {    // merges in order -> parents [first, middle, last, height]
    const nodes = Array.from({length: count}, (_, i) => [i, i, 0]);
    return picks.map(pick => {
      const [[first, middle, low], [, last, high]] = nodes.slice(pick, pick + 2), height = 1 + Math.max(low, high);
      nodes.splice(pick, 2, [first, last, height]);
      return [first, middle, last, height];
    });
  }

  function drawBeam({words}, result, step) {    // lattice of hypotheses, and the tree of the best one in this step
    const {lattice} = result, {centres, width} = tokenPlaces(words), most = Math.max(1, ...lattice.map(column => column.length));
    const path = (column, rank) => {    // ranks of a hypothesis and of those it comes from, by step
      const ranks = [];
      for (let at = column; at >= 0; at--) { ranks[at] = rank; rank = lattice[at][rank].from; }
      return ranks;
    };
    const survive = lattice.map(() => new Set()), end = lattice.length - 1, best = step ? path(step - 1, 0) : [];
    if (end >= 0) lattice[end].forEach((_, rank) => path(end, rank).forEach((at, column) => survive[column].add(at)));
    const {marks, base} = treeMarks(words, centres, replay(best.map((rank, column) => lattice[column][rank].pick), words.length)
      .map((parent, i) => [...parent, i === step - 1 ? "new" : "old"]), Math.max(1, ...result.hypotheses.map(one => Math.max(...one.steps))));
    const x = column => 34 + 22 * (column + 1), y = rank => base + 52 + 22 * rank, wide = Math.max(width, x(lattice.length) + 10);
    marks.push(`<rect class="outline" x="${x(step - 1) - 10}" y="${base + 34}" width="20" height="${22 * most + 8}" rx="6"/>`);
    const kind = (column, rank) => `${survive[column].has(rank) ? "kept" : "lost"}${column < step && best[column] === rank ? " best" : ""}`;
    lattice.forEach((nodes, column) => nodes.forEach(({from}, rank) =>
      marks.push(`<path class="edge ${kind(column, rank)}" d="M${x(column - 1)} ${y(column ? from : 0)}L${x(column)} ${y(rank)}"/>`)));
    marks.push(`<circle class="node kept best" cx="${x(-1)}" cy="${y(0)}" r="5"/>`);
    lattice.forEach((nodes, column) => nodes.forEach((node, rank) =>
      marks.push(`<circle class="node ${kind(column, rank)}" cx="${x(column)}" cy="${y(rank)}" r="5"><title>step ${column + 1}, hypothesis ${rank + 1}: log-probability ${node.score.toFixed(2)}</title></circle>`)));
    return svg(wide, y(most) + 2, step ? `The ${lattice[step - 1].length} hypotheses of step ${step}; the best has composed ${step} of ${words.length - 1} pairs, last tokens ${best.length ? describeLast(words, best, lattice) : ""}.` : "One hypothesis, in which nothing is composed.", marks);
  }

  function describeLast(words, best, lattice) {
    const [first, , last] = replay(best.map((rank, column) => lattice[column][rank].pick), words.length).at(-1);
    return `${first + 1} to ${last + 1}, ${words.slice(first, last + 1).slice(0, 8).join(" ")}`;
  }

  // The player
  const GRADES = ["very negative", "negative", "neutral", "positive", "very positive"], SIGNS = ["− −", "−", "0", "+", "+ +"];

  function sentiment(player, {words, unknown}, result) {
    return `${player.title}: ${GRADES[result.value]} with probability ${result.probabilities[result.value].toFixed(3)}. ` +
      `${words.length} tokens, ${result.rounds} ${player.beam ? "steps" : "rounds"}, ${(result.milliseconds / 1000).toFixed(2)} s.` +
      (unknown.length ? ` Not in the vocabulary: ${[...new Set(unknown)].join(", ")}.` : "");
  }

  function sentences(player, {value, spans, words}, result) {
    const right = value === result.value, chance = result.probabilities[result.value].toFixed(3), found = new Set(local.treeSpans(result.steps).map(([first, , last]) => `${first},${last}`));
    const grouped = spans.filter(([first, last]) => found.has(`${first},${last}`)).length, unit = player.beam ? "steps" : "rounds";
    return `${player.title} computes ${result.value} with probability ${chance}: ${right ? "right" : `wrong, the value is ${value}`}. ` +
      `${words.length} tokens, ${result.rounds} ${unit}, ${(result.milliseconds / 1000).toFixed(2)} s. ` +
      (spans.length ? `The tree contains ${grouped} of the ${spans.length} sub-expressions.` : "");
  }

  function build(box, index) {
    const id = `player-${index}`, weights = box.dataset.weights, beam = weights.startsWith("ebt_grc");
    const player = {title: box.dataset.title, beam}, figure = box.querySelector("figure"), drawing = figure.querySelector(".drawing");
    const hard = JSON.parse(box.querySelector("script[type='application/json']")?.textContent || "[]");
    const input = element("textarea", {id, rows: "3", spellcheck: "false", autocapitalize: "off", autocomplete: "off", "aria-describedby": `${id}-error`});
    const prose = weights.endsWith("-sst5"), label = prose ? "Sentence" : "ListOps expression";
    const names = prose ? GRADES : [..."0123456789"], marks = prose ? SIGNS : names;
    const [compute, random, pick] = ["Compute", "Random expression", prose ? "Example sentence" : "Hard expression"].map((text, i) => element("button", {type: i ? "button" : "submit"}, text));
    const error = element("p", {id: `${id}-error`, class: "player-error", role: "alert"});
    const status = element("p", {class: "player-status", role: "status", "aria-live": "polite"});
    const bars = element("div", {class: "player-bars", role: "img", hidden: ""}), table = element("div", {class: "player-hypotheses", hidden: ""});
    const form = element("form", {class: "player-form", "aria-label": `${player.title} on ${prose ? "a sentence" : "an expression"}`}, element("label", {for: id}, label), input,
      element("div", {class: "player-buttons"}, compute, ...(prose ? [] : [random]), ...(hard.length ? [pick] : [])));
    const width = element("input", {type: "range", id: `${id}-k`, min: "1", max: "8", value: "5"}), shown = element("output", {for: `${id}-k`}, "5");
    if (beam) form.append(element("div", {class: "player-width"}, element("label", {for: `${id}-k`}, "Beam width K"), width, shown));
    const unit = beam ? "step" : "round";
    const steps = rvnnSteps({
      group: beam ? "Steps" : "Rounds", slider: unit,
      say: (at, last) => at ? `after ${unit} ${at} of ${last}` : `before the first ${unit}`,
      show: at => { drawing.innerHTML = beam ? drawBeam(given, result, at) : drawRounds(given, result, at); },
    });
    steps.box.hidden = true;
    form.noValidate = true;
    box.prepend(form, error, status, bars, table, steps.box);
    let given = null, result = null, latest = 0;

    function showAnswer() {
      status.textContent = (prose ? sentiment : sentences)(player, given, result);
      if (!prose) status.dataset.right = String(result.value === given.value);
      bars.hidden = steps.box.hidden = false;
      bars.setAttribute("aria-label", `Probability of each ${prose ? "grade" : "digit"}: ` + result.probabilities.map((p, i) => `${names[i]}: ${p.toFixed(3)}`).join(", "));
      bars.innerHTML = result.probabilities.map((p, i) => `<span class="bar${i === given.value ? " true" : ""}"><i style="height:${(100 * p).toFixed(1)}%"></i><b>${marks[i]}</b></span>`).join("");
      if (beam) {
        table.hidden = false;
        table.innerHTML = `<table><caption>Final hypotheses</caption><thead><tr><th scope="col">rank</th><th scope="col">weight</th><th scope="col">value</th><th scope="col">probability</th></tr></thead><tbody>` +
          result.hypotheses.map((one, rank) => `<tr><th scope="row">${rank + 1}</th><td>${one.weight.toFixed(3)}</td><td>${names[one.value]}</td><td>${one.probability.toFixed(3)}</td></tr>`).join("") + "</tbody></table>";
      }
      steps.reset(result.rounds + 1, result.rounds);
    }

    function refuse(problem) {
      error.textContent = problem.message;
      status.textContent = "";
      input.setAttribute("aria-invalid", "true");
      if (problem.token) { input.focus(); input.setSelectionRange(problem.token.start, problem.token.end); }
    }

    async function answer() {
      const turn = ++latest;
      steps.stop();
      error.textContent = "";
      input.removeAttribute("aria-invalid");
      try {
        const asked = prose ? local.readSentence(input.value, (await modelHere(weights)).vocabulary) : local.parse(input.value);
        if (asked.words.length > MOST) throw new Error(`the ${prose ? "sentence" : "expression"} has ${asked.words.length} tokens; the page computes at most ${MOST}`);
        status.textContent = "Computing …";
        const found = await run(weights, asked.words, Number(width.value));
        if (turn !== latest) return;
        [given, result] = [asked, found];
        showAnswer();
        box.dataset.ready = String(turn);
      } catch (problem) { if (turn === latest) refuse(problem); }
    }

    let next = 0;
    form.onsubmit = event => { event.preventDefault(); answer(); };
    input.onkeydown = event => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); answer(); } };
    random.onclick = () => { input.value = local.drawExpression(); answer(); };
    pick.onclick = () => { input.value = hard[next++ % hard.length]; answer(); };
    width.oninput = () => { shown.textContent = width.value; if (given) answer(); };
    input.value = box.dataset.start;
    const begin = () => { if (!latest) answer(); };    // computed when the player comes near the window
    if ("IntersectionObserver" in window) new IntersectionObserver((entries, watch) => { if (entries.some(entry => entry.isIntersecting)) { watch.disconnect(); begin(); } }, {rootMargin: "200px"}).observe(box);
    else begin();
  }

  window.rvnnPlay = {run, parse: local.parse, modelHere, readSentence: local.readSentence, workerUsed: () => Boolean(worker)};
  document.querySelectorAll(".model-player").forEach(build);
})();
