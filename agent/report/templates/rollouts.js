// The rollouts browser. What is chosen stands in the address after #, so that a view can be linked to.
const COLOURS = {
  trained: "trained or masked",
  advantage: "advantage",
  ratio: "ratio trainer / sampler",
  logp: "sampler's probability",
  none: "none",
};
const ORDERS = { sampled: "as sampled", reward: "reward", length: "length", ratio: "mismatch" };
const DEFAULTS = { step: "", group: "", view: "list", colour: "trained", find: "", show: "all", order: "sampled" };
const CHOICES = { view: ["list", "groups"], colour: Object.keys(COLOURS), order: Object.keys(ORDERS) };
const PAGE = 40;

class Browser {
  constructor(place, facts) {
    this.place = place;
    this.steps = facts.steps;
    this.limits = facts.limits;
    this.chosen = { ...DEFAULTS };
    this.most = PAGE;
    this.readHash();
    window.addEventListener("hashchange", () => { this.readHash(); this.draw(); });
    this.draw();
  }

  readHash() {
    const given = new URLSearchParams(location.hash.slice(1));
    if (![...given.keys()].some((name) => name in DEFAULTS)) return;
    for (const name of Object.keys(DEFAULTS)) {
      const value = given.get(name) ?? DEFAULTS[name];
      this.chosen[name] = name in CHOICES && !CHOICES[name].includes(value) ? DEFAULTS[name] : value;
    }
  }

  choose(changes) {
    Object.assign(this.chosen, changes);
    this.most = PAGE;
    const told = new URLSearchParams();
    for (const [name, value] of Object.entries(this.chosen)) if (value !== DEFAULTS[name]) told.set(name, value);
    history.replaceState(null, "", `#${told.toString() || "browser"}`);
    this.draw();
  }

  get step() {
    return this.steps.find((one) => String(one.step) === this.chosen.step) ?? this.steps[this.steps.length - 1];
  }

  draw() {
    const focus = document.activeElement?.id, bar = this.bar();
    this.place.replaceChildren(bar, this.scale(), this.list());
    if (focus) document.getElementById(focus)?.focus();
    const { view, colour } = this.chosen;
    Object.assign(this.place.dataset, { step: this.step.step, view, colour, shown: this.place.querySelectorAll(".rollout").length });
  }

  select(name, options) {
    const made = element("select", { id: `choose-${name}` });
    for (const [value, text] of options) made.append(element("option", { value, text, ...(value === this.chosen[name] ? { selected: "" } : {}) }));
    made.addEventListener("change", () => this.choose({ [name]: made.value, ...(name === "step" ? { group: "" } : {}) }));
    return made;
  }

  toggle(name, options) {
    const made = element("span", { class: "switch" });
    for (const [value, text] of Object.entries(options)) {
      made.append(element("button", { type: "button", id: `${name}-${value}`, text, "aria-pressed": this.chosen[name] === value, onclick: () => this.choose({ [name]: value }) }));
    }
    return made;
  }

  bar() {
    const groups = [...new Set(this.step.rollouts.map((one) => one.group))];
    const states = [...new Set(this.step.rollouts.map((one) => one.status))].filter((one) => one !== "scored");
    const show = { all: "all", trained: "with an advantage", masked: "without", truncated: "cut by the limit", ...Object.fromEntries(states.map((one) => [`status:${one}`, `left out: ${one}`])) };
    const find = element("input", { type: "search", id: "find-rollouts", value: this.chosen.find, placeholder: "text, row or id", autocomplete: "off" });
    find.addEventListener("change", () => this.choose({ find: find.value }));
    const steps = this.steps.map((one) => [String(one.step), `${one.step}`]);
    const step = this.select("step", steps);
    step.value = String(this.step.step);
    const top = element("div", { class: "bar" },
      element("label", {}, "step ", step),
      element("label", {}, "group ", this.select("group", [["", "all"], ...groups.map((one) => [String(one), String(one)])])),
      this.toggle("view", { list: "list", groups: "groups" }),
      element("label", {}, "find ", find),
      element("label", {}, "show ", this.select("show", Object.entries(show))),
      element("label", {}, "order ", this.select("order", Object.entries(ORDERS))));
    return element("div", {}, top, element("div", { class: "bar" }, element("span", { text: "colour tokens by" }), this.toggle("colour", COLOURS)), this.facts());
  }

  facts() {
    const { version, digest, ledger } = this.step;
    const out = Object.entries(ledger.excluded ?? {}).map(([why, count]) => `${why} ${count}`).join(", ");
    const told = `policy version ${version} (${digest}): sampled ${shownNumber(ledger.sampled)} = trained ${shownNumber(ledger.trained)}${out ? ` + left out (${out})` : ""}`;
    return element("div", { class: "small" }, element("bdi", { text: told }));
  }

  scale() {
    const swatches = {
      trained: [["rgba(var(--learned), .45)", "trained"], ["rgba(var(--learned), .15)", "in the statistics, advantage 0: no gradient"], ["rgba(var(--hidden), .35)", "masked: prompt, or left out"]],
      advantage: [["rgba(var(--minus), .6)", "worse than its group"], ["transparent", "0"], ["rgba(var(--plus), .6)", "better"]],
      ratio: [["rgba(var(--minus), .6)", "trainer finds it less likely (1/2)"], ["transparent", "1"], ["rgba(var(--plus), .6)", "more likely (2)"]],
      logp: [["transparent", "certain"], ["rgba(var(--minus), .7)", "unlikely (e^-5)"]],
      none: [],
    }[this.chosen.colour] ?? [];
    const made = element("div", { class: "bar scale" });
    for (const [colour, text] of swatches) {
      const swatch = element("span", { class: "swatch", text });
      swatch.style.background = colour;
      made.append(swatch);
    }
    if (this.chosen.colour === "ratio" && !this.step.rollouts.some((one) => one.ratios)) {
      made.append("no log-probs of the trainer are stored for this step");
    }
    return made;
  }

  text(rollout) {
    if (rollout.work) return rollout.work.segments.flatMap((one) => one.spans.flatMap((span) => span.tokens ?? [])).map((one) => this.step.texts[one][1]).join("");
    return rollout.tokens ? rollout.tokens.map((one) => this.step.texts[one][1]).join("") : rollout.text ?? "";
  }

  promptText(rollout) {
    const tokens = this.step.prompts[rollout.prompt]?.tokens;
    return tokens ? tokens.map((one) => this.step.texts[one][1]).join("") : "";
  }

  matching() {
    const { group, find, show, order } = this.chosen, wanted = find.toLowerCase();
    const tests = {
      trained: (one) => one.advantage !== 0,
      masked: (one) => one.advantage === 0,
      truncated: (one) => one.truncated,
    };
    const test = show.startsWith("status:") ? (one) => one.status === show.slice(7) : tests[show] ?? (() => true);
    const found = this.step.rollouts.filter((one) => (group === "" || String(one.group) === group) && test(one) &&
      (!wanted || [this.text(one), this.promptText(one), one.place, one.id, one.error].some((text) => String(text ?? "").toLowerCase().includes(wanted))));
    const key = { reward: (one) => -(one.reward ?? -Infinity), length: (one) => -one.num_tokens, ratio: (one) => -(one.mean_ratio_distance ?? -1) }[order];
    return key ? found.sort((a, b) => key(a) - key(b)) : found;
  }

  list() {
    const found = this.matching(), shown = found.slice(0, this.most);
    const made = element("div", { id: "found" }, element("div", { class: "small", text: `${found.length} of ${this.step.rollouts.length} rollouts` }));
    if (this.chosen.view === "groups") {
      for (const group of [...new Set(shown.map((one) => one.group))]) made.append(this.group(group, shown.filter((one) => one.group === group)));
    } else {
      made.append(...shown.map((one) => this.rollout(one, true)));
    }
    if (found.length > shown.length) {
      const more = () => { this.most += PAGE; this.draw(); };
      made.append(element("button", { type: "button", text: `show ${Math.min(PAGE, found.length - shown.length)} more`, onclick: more }));
    }
    return made;
  }

  group(number, members) {
    const all = this.step.rollouts.filter((one) => one.group === number);
    const rewards = all.map((one) => one.reward).filter((one) => one !== null);
    const mean = rewards.reduce((sum, one) => sum + one, 0) / (rewards.length || 1);
    const told = `group ${number}: ${all.length} rollouts of ${all[0].place}, mean reward ${rewards.length ? shownNumber(mean) : "–"}, ` +
      `${new Set(rewards).size < 2 ? "no spread: nothing to learn from it" : `${shownNumber(Math.min(...rewards))} to ${shownNumber(Math.max(...rewards))}`}`;
    return element("div", { class: "group", "data-group": number }, element("h3", {}, element("bdi", { text: told })), this.prompt(all[0]),
      element("div", { class: "members" }, ...members.map((one) => this.rollout(one, false))));
  }

  prompt(rollout) {
    const prompt = this.step.prompts[rollout.prompt];
    const made = element("div", { class: "prompt tokens" });
    if (!prompt?.tokens) made.textContent = `(prompt of ${prompt?.num_tokens ?? 0} tokens; its text is not shown)`;
    else {
      if (prompt.left_out) made.append(`(${prompt.left_out} tokens before this are left out) `);
      made.append(...this.tokens(prompt.tokens, (span) => { if (this.chosen.colour === "trained") span.style.background = "rgba(var(--hidden), .18)"; }));
    }
    return made;
  }

  rollout(one, withPrompt) {
    const isTrained = one.status === "scored" && one.reward !== null;
    const head = element("div", { class: "head" });
    const told = (name, value) => head.append(element("span", {}, `${name} `, element("b", {}, element("bdi", { text: value }))));
    told("rollout", one.id);
    told("reward", shownNumber(one.reward));
    for (const [name, value] of Object.entries(one.parts)) told(name, shownNumber(value));
    told("advantage", shownNumber(one.advantage));
    told("tokens", one.num_tokens + (one.truncated ? ", cut by the limit" : ""));
    told("version", one.version);
    told("row", one.place);
    if (one.mean_ratio_distance !== null) told("mean |log ratio|", shownNumber(one.mean_ratio_distance));
    if (!isTrained) told("left out:", one.status);
    const made = element("div", { class: `rollout${isTrained ? "" : " untrained"}`, "data-id": one.id, "data-status": one.status }, head);
    if (one.error) made.append(element("div", { class: "error text", text: one.error }));
    if (one.work) {
      made.append(...this.work(one, isTrained));
      return made;
    }
    if (withPrompt) made.append(this.prompt(one));
    made.append(this.completion(one, isTrained));
    return made;
  }

  work(one, isTrained) {
    const { segments, not_used, facts, log, verifier_log } = one.work;
    const told = Object.entries(facts).map(([name, value]) => `${name} ${value}`).join(", ");
    const rest = Object.entries(not_used).map(([why, count]) => `${count} ${why}`).join(", ");
    const made = [element("div", { class: "small", text: `${told}${rest ? `; calls that are no part of it: ${rest}` : ""}` })];
    segments.forEach((segment, number) => made.push(this.segment(one, segment, number, isTrained)));
    for (const [title, text] of [["what the agent's box said", log], ["what the verifier said", verifier_log]]) {
      if (text) made.push(element("details", { class: "log" }, element("summary", { text: title }), element("pre", { class: "text", text })));
    }
    return made;
  }

  segment(one, segment, number, isTrained) {
    const from = segment.parent === null ? "" : `, goes on from segment ${segment.parent + 1}`;
    const title = `segment ${number + 1} (${segment.history}${from}): ${segment.num_calls} call${segment.num_calls === 1 ? "" : "s"}, ${segment.num_tokens} tokens`;
    const made = element("div", { class: "segment", "data-history": segment.history }, element("div", { class: "small", text: title }));
    for (const span of segment.spans) {
      const part = element("div", { class: span.sampled ? "tokens completion" : "prompt tokens" });
      const left = span.left_out ? element("span", { class: "small", text: ` (${span.left_out} tokens are left out here) ` }) : "";
      const own = { ...one, logps: span.logps, ratios: span.ratios };
      const given = (token) => { if (this.chosen.colour === "trained") token.style.background = "rgba(var(--hidden), .18)"; };
      const paint = span.sampled ? (token, place) => this.paint(token, own, place, isTrained) : given;
      if (!span.tokens) part.append("(not shown: it holds a secret, or texts of tokens are not stored)");
      else if (span.sampled) part.append(...this.tokens(span.tokens, paint), left);
      else part.append(left, ...this.tokens(span.tokens, paint));
      made.append(part);
    }
    return made;
  }

  completion(one, isTrained) {
    const made = element("div", { class: "tokens completion" });
    if (!one.tokens) {
      made.append(one.text ?? "", element("div", { class: "small", text: one.is_masked ? "(shown whole: it held a secret)" : "(texts of single tokens are not stored for this step)" }));
      return made;
    }
    const paint = (span, place) => this.paint(span, one, place, isTrained);
    const spans = this.tokens(one.tokens, paint);
    if (one.cut) spans.splice(one.cut[0], 0, element("span", { class: "small", text: ` (${one.cut[1]} tokens are left out here) ` }));
    made.append(...spans);
    return made;
  }

  tokens(tokens, paint) {
    const texts = tokens.map((one) => this.step.texts[one]);
    const hits = this.hits(texts.map((one) => one[1]));
    return texts.map(([id, text], place) => {
      const span = element("span", { class: `token${hits.has(place) ? " hit" : ""}`, title: `id ${id}` });
      span.textContent = text.replaceAll("\n", "↵\n");
      paint(span, place);
      return span;
    });
  }

  hits(texts) {
    const wanted = this.chosen.find.toLowerCase(), found = new Set();
    if (!wanted) return found;
    const joined = texts.join("").toLowerCase();
    for (let at = joined.indexOf(wanted); at >= 0; at = joined.indexOf(wanted, at + 1)) {
      let start = 0;
      texts.forEach((text, place) => {
        if (text && start < at + wanted.length && start + text.length > at) found.add(place);
        start += text.length;
      });
    }
    return found;
  }

  paint(span, one, place, isTrained) {
    const ratio = one.ratios?.[place] ?? null, logp = one.logps?.[place] ?? null;
    const hasGradient = isTrained && (one.advantage !== 0 || Boolean(this.limits.beta));
    span.title += logp === null ? "" : `\nsampler's log-prob ${logp} (p = ${shownNumber(Math.exp(logp))})`;
    span.title += ratio === null ? "" : `\nratio trainer / sampler ${ratio}`;
    span.dataset.state = hasGradient ? "trained" : isTrained ? "flat" : "masked";
    const shade = (part) => `rgba(var(--${part > 0 ? "plus" : "minus"}), ${Math.min(0.75, Math.abs(part) * 0.75).toFixed(3)})`;
    const most = this.step.most ??= Math.max(1e-9, ...this.step.rollouts.map((other) => Math.abs(other.advantage)));
    const cap = this.limits.correction_cap ?? 2;
    const colours = {
      trained: () => ({ trained: "rgba(var(--learned), .45)", flat: "rgba(var(--learned), .15)", masked: "rgba(var(--hidden), .35)" })[span.dataset.state],
      advantage: () => (one.advantage && isTrained ? shade(one.advantage / most) : ""),
      ratio: () => (ratio === null ? "rgba(var(--hidden), .2)" : shade(Math.log2(ratio))),
      logp: () => (logp === null ? "" : shade(-Math.min(1, -logp / 5))),
    };
    span.style.background = colours[this.chosen.colour]?.() ?? "";
    if (this.chosen.colour === "ratio" && ratio !== null && ratio > cap) span.classList.add("limited");
  }
}
