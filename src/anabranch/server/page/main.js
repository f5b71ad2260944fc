// Polls the server once a second and passes the answer to charts and heat map; pauses while the page is hidden.

import { Unreachable, request } from "./api.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { ExpertMap } from "./experts.js";

const EVERY = 1000; // ms
const SLOWEST = 8000; // between two tries at a server that does not answer

const charts = new Charts(document.getElementById("charts"));
const experts = new ExpertMap();
const chat = new Chat();

function say(phase, words, title = "") {
  const status = document.getElementById("status");
  if (status.textContent === words) return; // set again, a screen reader would read it again
  status.dataset.phase = phase;
  status.textContent = words;
  status.title = title;
}

async function look() {
  const stats = await (await request(`debug/stats?since=${charts.newest}`)).json();
  document.getElementById("model").textContent = stats.model;
  say(stats.phase, stats.phase === "loading" ? stats.reason : stats.phase, stats.reason);
  chat.introduce(stats);
  charts.add(stats.samples);
  const { total, ranks } = await (await request("debug/experts")).json();
  experts.update(total, ranks);
}

const visible = () =>
  new Promise((resolve) => {
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", function back() {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", back);
      resolve();
    });
  });

async function watch() {
  for (let wait = EVERY; ; ) {
    await visible();
    try {
      await look();
      wait = EVERY;
    } catch (error) {
      say("dead", error instanceof Unreachable ? "server unreachable" : "server error", error.message);
      wait = Math.min(SLOWEST, 2 * wait);
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

watch();
