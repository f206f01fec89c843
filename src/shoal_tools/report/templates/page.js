"use strict";

// The rows of layers: all of them, those that are searched for, the one that a link points to.
(() => {
  const list = document.getElementById("layers");
  if (!list) return;
  const all = document.getElementById("all");
  const find = document.getElementById("find");
  const hidden = document.getElementById("hidden");
  const show = () => {
    const words = find ? find.value.trim().toLowerCase() : "";
    list.classList.toggle("few", Boolean(all) && !all.checked && !words);
    if (hidden) hidden.hidden = !list.classList.contains("few");
    for (const row of list.children) {
      row.classList.toggle("missed", !row.dataset.words.toLowerCase().includes(words));
    }
  };
  if (all) all.addEventListener("change", show);
  if (find) find.addEventListener("input", show);
  const point = () => {
    const row = location.hash.startsWith("#layer-") && document.querySelector(location.hash);
    if (row) {
      row.open = true;
      row.scrollIntoView({ block: "center" });
    }
  };
  addEventListener("hashchange", point);
  if (all) show();
  point();
})();

// The timeline: rows of threads and links, each as predicted and as one rank did it.
(() => {
  const source = document.getElementById("timeline-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const canvas = document.getElementById("timeline");
  const box = document.getElementById("timeline-box");
  const tip = document.getElementById("tip");
  const select = document.getElementById("rank");
  const foreign = document.getElementById("foreign");
  const pen = canvas.getContext("2d");
  const EVENT = 17, GAP = 5, LINK = 26, AXIS = 22, GROUP = 9;
  const predicted = data.tracks.find((track) => track.name === "predicted");
  const ranks = data.tracks.filter((track) => track !== predicted);
  let rank = ranks[0];
  let rows = [], height = 0, left = 150, seen = data.window.slice();
  // The predicted step begins its backward where the rank beside it does.
  const shift = (row) => (row.track === predicted && rank ? rank.backward : 0);

  // Of each thread the predicted row first, the measured one below it; links come last.
  const arrange = () => {
    const shown = [predicted, rank].filter(Boolean);
    const names = [];
    for (const track of shown) {
      for (const lane of track.lanes) if (!names.includes(lane.name)) names.push(lane.name);
    }
    rows = [];
    let y = AXIS;
    const add = (track, what, tall) => {
      const name = rows.length && rows[rows.length - 1].group === what.name ? "" : what.name;
      if (name) y += GROUP;
      rows.push({ y, tall, track, what, name, group: what.name });
      y += tall + GAP;
    };
    for (const name of names) {
      for (const track of shown) {
        const lane = track.lanes.find((each) => each.name === name);
        if (lane) add(track, lane, EVENT * lane.depth);
      }
    }
    for (const track of shown) {
      for (const link of track.links) if (link.own || foreign.checked) add(track, link, LINK);
    }
    height = y + GAP;
  };

  const time = (us) => {
    if (Math.abs(us) >= 1e6) return (us / 1e6).toFixed(2) + " s";
    if (!us) return "0";
    if (Math.abs(us) >= 1e3) return (us / 1e3).toFixed(Math.abs(us) >= 1e5 ? 0 : 1) + " ms";
    return Math.round(us) + " µs";
  };
  const tick = (span) => {
    const rough = span / 8, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= rough);
  };
  const x = (us) => left + ((us - seen[0]) / (seen[1] - seen[0])) * (canvas.clientWidth - left);
  const at = (px) => seen[0] + ((px - left) / (canvas.clientWidth - left)) * (seen[1] - seen[0]);

  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const wide = canvas.clientWidth, ratio = devicePixelRatio || 1;
    left = wide < 700 ? 96 : 190;
    canvas.style.height = height + "px";
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.clearRect(0, 0, wide, height);
    const step = tick(seen[1] - seen[0]);
    pen.strokeStyle = colour("--line");
    pen.fillStyle = colour("--soft");
    for (let us = Math.ceil(seen[0] / step) * step; us <= seen[1]; us += step) {
      pen.fillText(time(us), x(us) + 3, 8);
      pen.beginPath();
      pen.moveTo(x(us), 0);
      pen.lineTo(x(us), height);
      pen.stroke();
    }
    let drawn = 0;
    for (const row of rows) {
      pen.save();
      pen.beginPath();
      pen.rect(left, row.y, wide - left, row.tall);
      pen.clip();
      pen.globalAlpha = row.track === predicted && rank ? 0.65 : 1;
      drawn += row.what.events ? events(row, colour) : rates(row, colour);
      pen.restore();
      pen.fillStyle = colour(row.name ? "--ink" : "--soft");
      const said = `${row.name ? row.name + " · " : ""}${row.track.name}`;
      pen.textAlign = "right";
      pen.fillText(cut(said, left - 12), left - 8, row.y + Math.min(row.tall, EVENT) / 2);
      pen.textAlign = "left";
    }
    if (rank) {
      pen.setLineDash([2, 3]);
      pen.strokeStyle = colour("--ink");
      for (const us of rank.steps.filter((us) => us > seen[0] && us < seen[1])) {
        pen.beginPath();
        pen.moveTo(x(us), AXIS);
        pen.lineTo(x(us), height);
        pen.stroke();
      }
      pen.setLineDash([]);
    }
    canvas.dataset.drawn = drawn;
    canvas.dataset.window = seen.map(Math.round).join(" ");
  };
  const cut = (text, wide) => {
    if (pen.measureText(text).width <= wide) return text;
    while (text.length > 1 && pen.measureText(text + "…").width > wide) text = text.slice(0, -1);
    return text + "…";
  };
  const events = (row, colour) => {
    let drawn = 0;
    for (const [label, start, long, depth] of row.what.events) {
      const begin = start + shift(row);
      if (begin + long < seen[0] || begin > seen[1]) continue;
      const from = Math.max(x(begin), left), wide = Math.max(x(begin + long) - from, 1);
      const inset = 2 * depth;
      pen.fillStyle = colour("--k" + data.labels[label][1]);
      pen.fillRect(from, row.y + EVENT * depth, wide > 3 ? wide - 0.5 : wide, EVENT - inset);
      if (wide > 44) {
        pen.fillStyle = colour("--card");
        pen.fillText(cut(data.labels[label][0], wide - 8), from + 4,
          row.y + EVENT * depth + (EVENT - inset) / 2 + 0.5);
      }
      drawn += 1;
    }
    return drawn;
  };
  const rates = (row, colour) => {
    const { rates: told, most } = row.what, floor = row.y + row.tall;
    pen.fillStyle = colour("--k5");
    pen.beginPath();
    const by = shift(row);
    pen.moveTo(x(told[0][0] + by), floor);
    told.forEach(([us, mbit], number) => {
      const y = floor - (mbit / most) * (row.tall - 2);
      const until = number + 1 < told.length ? told[number + 1][0] : us;
      pen.lineTo(x(us + by), y);
      pen.lineTo(x(until + by), y);
    });
    pen.lineTo(x(told[told.length - 1][0] + by), floor);
    pen.fill();
    return told.length;
  };

  const move = (from, to) => {
    const span = Math.min(Math.max(to - from, 10), data.end);
    from = Math.min(Math.max(from, 0), data.end - span);
    seen = [from, from + span];
    requestAnimationFrame(draw);
  };
  const zoom = (times, middle) => {
    const [from, to] = seen, about = middle === undefined ? (from + to) / 2 : middle;
    move(about - (about - from) / times, about + (to - about) / times);
  };
  const slide = (part) => {
    const by = part * (seen[1] - seen[0]);
    move(seen[0] + by, seen[1] + by);
  };
  const acts = {
    in: () => zoom(2), out: () => zoom(0.5), all: () => move(0, data.end),
    step: () => move(...data.window),
  };
  const keys = {
    "+": acts.in, "=": acts.in, "-": acts.out, "0": acts.all, "1": acts.step,
    ArrowLeft: () => slide(-0.25), ArrowRight: () => slide(0.25),
  };

  const told = (event) => {
    const frame = canvas.getBoundingClientRect();
    const px = event.clientX - frame.left, py = event.clientY - frame.top;
    const row = rows.find((each) => py >= each.y && py < each.y + each.tall);
    if (!row || px < left) return "";
    const us = at(px) - shift(row);
    if (row.what.rates) {
      const now = row.what.rates.filter((rate) => rate[0] <= us).pop();
      return now ? `${row.what.name}, ${row.track.name}: ${now[1]} Mbit/s` : "";
    }
    const slack = (2 * (seen[1] - seen[0])) / (canvas.clientWidth - left);
    const depth = Math.floor((py - row.y) / EVENT);
    const hit = row.what.events.filter(([, begin, long, deep]) =>
      deep === depth && us >= begin - slack && us <= begin + long + slack).pop();
    if (!hit) return "";
    return `${data.labels[hit[0]][0]}, ${row.track.name}: ${time(hit[2])}, from ${time(hit[1] + shift(row))}`;
  };
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { px: event.clientX, seen: seen.slice() };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointercancel", () => { held = null; });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointermove", (event) => {
    if (held) {
      const by = ((held.px - event.clientX) / (canvas.clientWidth - left))
        * (held.seen[1] - held.seen[0]);
      move(held.seen[0] + by, held.seen[1] + by);
      return;
    }
    const words = told(event), frame = box.getBoundingClientRect();
    tip.hidden = !words;
    tip.textContent = words;
    const px = event.clientX - frame.left;
    tip.style.left = Math.max(0, Math.min(px + 12, frame.width - tip.offsetWidth)) + "px";
    tip.style.top = event.clientY - frame.top + 16 + "px";
  });
  canvas.addEventListener("dblclick", (event) => {
    zoom(2, at(event.clientX - canvas.getBoundingClientRect().left));
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    const middle = at(event.clientX - canvas.getBoundingClientRect().left);
    zoom(event.deltaY < 0 ? 1.25 : 0.8, middle);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", acts[button.dataset.zoom]);
  }
  ranks.forEach((track, number) => select.add(new Option(track.name, number)));
  select.addEventListener("change", () => { rank = ranks[select.value]; arrange(); draw(); });
  document.getElementById("rank-label").hidden = ranks.length < 2;
  foreign.addEventListener("change", () => { arrange(); draw(); });
  document.getElementById("foreign-label").hidden =
    !ranks.some((track) => track.links.some((link) => !link.own));
  document.getElementById("timeline-tools").hidden = false;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", draw);
  arrange();
  draw();
})();
