/* Controls that step through states: buttons, a slider, a label that is spoken. Works from the disk.

`rvnnSteps` makes the controls for anything that can show state number i. Figures of the class `stepper` hold
their frames in the page and get controls here; play.js uses the same ones for the rounds of a model. */
(() => {
  "use strict";
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  /* group and slider: spoken names; say(at, last): the label of a state; show(at): draw it; pause: between two states, in ms. */
  function steps({group, slider: name, say, show, pause = 900}) {
    const slider = element("input", {type: "range", min: "0", max: "0", value: "0", "aria-label": name});
    const label = element("output", {"aria-live": "polite"});
    const button = (text, spoken) => element("button", {type: "button", "aria-label": spoken}, text);
    const [back, play, on] = [button("◀", "Back"), button("Play", "Play"), button("▶", "Forward")];
    const box = element("div", {class: "player-steps", role: "group", "aria-label": group}, back, ...(still ? [] : [play]), on, slider, label);
    let timer = null, last = 0;

    function go(step) {
      const at = Math.max(0, Math.min(last, step)), text = say(at, last);
      slider.value = at;
      label.textContent = text;
      slider.setAttribute("aria-valuetext", text);
      back.disabled = at === 0;
      on.disabled = at === last;
      show(at);
    }

    function namePlay(text) { play.textContent = text; play.setAttribute("aria-label", text); }
    function stop() { clearInterval(timer); timer = null; namePlay("Play"); }
    const turn = by => { stop(); go(Number(slider.value) + by); };

    play.onclick = () => {
      if (timer) return stop();
      if (Number(slider.value) >= last) go(0);
      namePlay("Pause");
      timer = setInterval(() => { go(Number(slider.value) + 1); if (Number(slider.value) >= last) stop(); }, pause);
    };
    back.onclick = () => turn(-1);
    on.onclick = () => turn(1);
    slider.oninput = () => turn(0);
    return {box, stop, go, reset(count, at) { last = slider.max = count - 1; go(at); }};
  }

  function turnFrames(figure) {    // a figure whose frames are in the page
    const frames = [...figure.querySelectorAll(".frame")], labels = frames.map(frame => frame.querySelector(".frame-label").textContent);
    const caption = figure.querySelector("figcaption").textContent.split(/[.:;] /)[0];
    const controls = steps({
      group: `Frames: ${caption}`, slider: "frame", say: at => labels[at], pause: 1200,
      show: at => frames.forEach((frame, i) => frame.classList.toggle("now", i === at)),
    });
    frames.forEach(frame => frame.removeAttribute("hidden"));
    figure.classList.add("live");
    figure.prepend(controls.box);
    controls.reset(frames.length, 0);
  }

  window.rvnnSteps = steps;
  window.rvnnElement = element;
  document.querySelectorAll("figure.stepper").forEach(turnFrames);
})();
