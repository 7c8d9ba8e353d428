/* Search over search-index.js, in the page: names before titles, headings and text; chapters before functions. */

// The kinds of pages, with their weights; a function that ranks pages for a query, and what it knows of words.
function rvnnFinder(index) {
  "use strict";
  const {pages, synonyms} = index;
  const WEIGHT = {Chapter: 1, Results: .9, Reference: .65, Implementation: .75, Workshop: .7, Library: .5};

  // Words: lower case, an identifier whole and in parts, endings off.
  function stem(word) {
    for (const end of ["ational", "ations", "ation", "ings", "ing", "ies", "ers", "er", "ed", "es", "s"])
      if (word.endsWith(end) && word.length - end.length >= 4) return word.slice(0, -end.length) + (end === "ies" ? "y" : "");
    return word.endsWith("s") && !word.endsWith("ss") && word.length > 3 ? word.slice(0, -1) : word;
  }

  function split(text) {
    return (text.normalize("NFKC").toLowerCase().match(/[\p{L}\p{N}]+(?:[-_.][\p{L}\p{N}]+)*/gu) || []).flatMap(word => {
      const parts = word.split(/[-_.]/);
      return parts.length > 1 ? [word, ...parts] : parts;
    }).map(stem);
  }

  const phrase = text => split(text).join(" ");
  const holds = (text, part) => ` ${text} `.includes(` ${part} `);

  // Index: for each word the sections that hold it.
  const sections = [], held = new Map(), QUIET = new Set(split("a an and are as at by for from how in is it of on or the to what with"));
  let total = 0;
  pages.forEach((page, number) => {
    page.phrase = phrase(page.title);
    page.called = page.names.map(phrase);
    page.words = new Set([page.phrase, ...page.called].flatMap(text => text.split(" ")));
    for (const [anchor, heading, text] of page.sections) {
      const words = split(text), at = sections.push({page: number, anchor, heading, text, phrase: phrase(heading), length: words.length + 20}) - 1;
      total += words.length + 20;
      const counts = new Map();
      words.forEach(word => counts.set(word, (counts.get(word) || 0) + 1));
      sections[at].phrase.split(" ").forEach(word => counts.set(word, (counts.get(word) || 0) + 6));
      counts.forEach((count, word) => { if (!held.has(word)) held.set(word, []); held.get(word).push([at, count]); });
    }
  });
  const mean = total / sections.length, vocabulary = [...held.keys()];

  function meant(query) {    // the query, and the query with a phrase replaced by one that means the same
    const first = phrase(query), found = new Map([[first, 1]]);
    for (const group of synonyms) {
      const phrases = group.map(phrase);
      for (const one of phrases) if (holds(first, one))
        for (const other of phrases) if (other !== one) found.set(` ${first} `.replace(` ${one} `, ` ${other} `).trim(), .8);
    }
    return [...found].slice(0, 12);
  }

  function rank(query, whole, factor, scores) {
    const words = [...new Set(query.split(" "))].filter(word => word && (!QUIET.has(word) || query === word));
    if (!words.length) return;
    const inSections = new Map(), matched = new Map();    // section -> score, page -> words that it holds
    words.forEach((word, number) => {
      const last = !whole && number === words.length - 1 && word.length > 2;
      for (const term of last ? vocabulary.filter(other => other.startsWith(word)) : [word]) {
        const list = held.get(term) || [], part = term === word ? 1 : .4;
        const idf = Math.log(1 + (sections.length - list.length + .5) / (list.length + .5));
        for (const [at, count] of list) {
          const {page, length} = sections[at], score = part * idf * count * 2.2 / (count + 1.2 * (.25 + .75 * length / mean));
          inSections.set(at, (inSections.get(at) || 0) + score);
          if (!matched.has(page)) matched.set(page, new Map());
          matched.get(page).set(word, Math.max(part, matched.get(page).get(word) || 0));
        }
      }
      pages.forEach((page, at) => {
        if (!page.words.has(word)) return;
        if (!matched.has(at)) matched.set(at, new Map());
        matched.get(at).set(word, 1);
      });
    });
    const best = new Map();
    for (const [at, score] of inSections) {
      const {page, phrase: heading} = sections[at];
      if (!best.has(page)) best.set(page, []);
      best.get(page).push([score * (holds(heading, query) ? 1.5 : 1), at]);
    }
    for (const [number, parts] of matched) {
      const page = pages[number], share = [...parts.values()].reduce((sum, part) => sum + part, 0) / words.length;
      const hits = (best.get(number) || []).sort((a, b) => b[0] - a[0]), text = hits.slice(0, 5).reduce((sum, [score], i) => sum + score / (i + 1), 0);
      const named = page.called.includes(query) ? 40 : page.called.some(name => holds(name, query)) ? 10 : 0;
      const titled = page.phrase === query ? 30 : holds(page.phrase, query) ? 15 : words.filter(word => holds(page.phrase, word)).length * 3;
      const score = factor * (WEIGHT[page.kind] * share ** 3 * text + (named + titled) * WEIGHT[page.kind]);
      if (share > .3 && score > (scores.get(number)?.score || 0)) scores.set(number, {page, score, words, hits: hits.slice(0, 3).map(([, at]) => sections[at])});
    }
  }

  function search(query, whole = true) {
    const scores = new Map();
    meant(query).forEach(([said, factor]) => rank(said, whole, factor, scores));
    return [...scores.values()].sort((a, b) => b.score - a.score);
  }

  return {search, split, kinds: Object.keys(WEIGHT)};
}

// The page
(() => {
  "use strict";
  const form = document.querySelector(".book-search-form"), MOST = 40;
  if (!form) return;
  const {search, split, kinds: KINDS} = rvnnFinder(rvnnIndex);

  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  function marked(text, words) {    // a piece of a text with the words of the query in it, marked
    const places = [...text.matchAll(/[\p{L}\p{N}]+(?:[-_.][\p{L}\p{N}]+)*/gu)].filter(([word]) => split(word).some(part => words.some(one => part === one || part.startsWith(one))));
    const from = Math.max(0, (places[0]?.index ?? 0) - 80), begin = from ? text.indexOf(" ", from) + 1 : 0, end = Math.min(text.length, begin + 220), made = element("span");
    let at = begin;
    for (const {0: word, index} of places) {
      if (index < at || index + word.length > end) continue;
      made.append(text.slice(at, index), element("mark", {}, word));
      at = index + word.length;
    }
    made.prepend(begin ? "… " : "");
    made.append(text.slice(at, end), end < text.length ? " …" : "");
    return made;
  }

  function draw({page, hits, words}, query) {
    const link = anchor => `${page.url}?highlight=${encodeURIComponent(query)}${anchor ? `#${anchor}` : ""}`;
    const below = hits.filter(hit => hit.anchor).map(hit => element("li", {}, element("a", {href: link(hit.anchor)}, hit.heading)));
    const about = hits.find(hit => hit.text) || {text: page.sections.find(([, , text]) => text)?.[2] || ""};
    return element("li", {"data-kind": page.kind}, element("a", {href: link(""), class: "search-title"}, page.title), " ", element("span", {class: "search-kind"}, page.kind),
      element("p", {}, marked(about.text, words)), ...(below.length ? [element("ul", {"aria-label": `Sections of ${page.title}`}, ...below)] : []));
  }

  const input = form.querySelector("input[type=search]");
  const status = document.querySelector(".search-status"), list = document.querySelector(".search-results"), kinds = form.querySelector(".search-kinds");
  const boxes = ["All", ...KINDS].map((kind, i) => {
    const box = element("input", {type: "radio", name: "kind", value: kind, id: `kind-${kind}`});
    box.checked = !i;
    kinds.append(element("span", {}, box, " ", element("label", {for: box.id}, kind)));
    return box;
  });

  function show(whole) {
    const query = input.value.trim(), found = query ? search(query, whole) : [], kind = boxes.find(box => box.checked).value;
    boxes.forEach(({value, nextElementSibling: label}) => {
      const count = value === "All" ? found.length : found.filter(({page}) => page.kind === value).length;
      label.textContent = query ? `${value} (${count})` : value;
    });
    const shown = kind === "All" ? found : found.filter(({page}) => page.kind === kind);
    list.replaceChildren(...shown.slice(0, MOST).map(one => draw(one, query)));
    status.textContent = !query ? "" : shown.length ? `${shown.length} pages${shown.length > MOST ? `, the first ${MOST} of them shown` : ""}` : `Nothing found for “${query}”.`;
    list.dataset.query = query;
  }

  form.onsubmit = event => {
    event.preventDefault();
    const url = new URL(location);
    url.searchParams.set("q", input.value.trim());
    history.replaceState(null, "", url);
    show(true);
  };
  input.oninput = () => show(false);
  kinds.onchange = () => show(true);
  input.value = new URLSearchParams(location.search).get("q") || "";
  show(true);
  input.focus();
  window.rvnnSearch = query => search(query).map(({page, score}) => ({url: page.url, title: page.title, kind: page.kind, score}));
})();
