// What the scripts of npm's clients share, as harness.py for Python's.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

export const SERVER = JSON.parse(process.argv[2]);
export const LONG = "river ".repeat(3000); // more than the context
export const MANY_TOKENS = 100_000; // as many as the context has room for
const CITIES = ["Paris", "Oslo"];
export const TOOL = {
  name: "get_weather",
  description: "The weather of a city",
  parameters: {
    type: "object",
    properties: { city: { type: "string", enum: CITIES } },
    required: ["city"],
    additionalProperties: false,
  },
};

export const SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 8 }, age: { type: "integer", minimum: 0, maximum: 99 } },
  required: ["name", "age"],
  additionalProperties: false,
};

export function checkPerson({ name, age }) {
  assert(typeof name === "string" && Number.isInteger(age), `${name}, ${age}`);
}

export function checkCall(name, given) {
  assert.equal(name, TOOL.name);
  assert(CITIES.includes(given.city), JSON.stringify(given));
}

async function numAborted() {
  const text = await (await fetch(`${SERVER.endless}/metrics`)).text();
  const isAborted = (line) => line.includes("request_success_total") && line.includes('finished_reason="abort"');
  const line = text.split("\n").find(isAborted);
  return line ? Number(line.split(" ").at(-1)) : 0;
}

// The endless server ends a request whose client has left.
export async function checkAbort(beginAndLeave) {
  const before = await numAborted();
  await beginAndLeave();
  const end = Date.now() + 20_000;
  while ((await numAborted()) === before) {
    assert(Date.now() < end, "the server has not aborted the request");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

// Print, for each row of the table, the package's version and how each case ended: null or a stack.
export async function run(name, rows) {
  const about = JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url)));
  const results = {};
  for (const [row, cases] of Object.entries(rows)) {
    const ended = {};
    for (const [title, one] of Object.entries(cases)) {
      try {
        await one();
        ended[title] = null;
      } catch (error) {
        ended[title] = String(error.stack ?? error);
      }
    }
    results[row] = { package: name, version: about.version, cases: ended };
  }
  console.log("\n" + JSON.stringify(results));
  process.exit(0); // connections that are kept alive
}
