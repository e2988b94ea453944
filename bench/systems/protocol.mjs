// protocol.py for Node: what every system under test can be asked to do, as lines of JSON.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { writeSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { setTimeout as sleep } from "node:timers/promises";

const POOL = 1000; // different jobs that a producer makes before it is timed
const ARGS_BYTES = 120;
const SETTLE_POLL_MS = 5;
const WARM_UP_JOBS = 20;

export const now = () => Number(process.hrtime.bigint()); // one clock for all processes

// The packages lie in a directory of their own, so they are not found from here.
const packages = createRequire(`${process.env.BENCH_PACKAGES}/`);
export const load = async (name) => import(pathToFileURL(packages.resolve(name)).href);
export const version = (name) =>
  packages(`${process.env.BENCH_PACKAGES}/node_modules/${name}/package.json`).version;

// What node-postgres wants instead of a URL whose host is a directory.
export const connection = (dsn) => {
  const url = new URL(dsn);
  return {
    host: url.searchParams.get("host"),
    port: Number(url.searchParams.get("port")),
    user: url.searchParams.get("user"),
    database: url.pathname.slice(1),
  };
};

export const waitUntilEmpty = async (isBusy) => {
  while (await isBusy()) await sleep(SETTLE_POLL_MS);
};

// So many jobs of the pool, from any place on, the pool being a ring of batches.
const sliceOf = (pool, first, jobs) => {
  const start = first % POOL;
  return start + jobs <= POOL ? pool.slice(start, start + jobs) : pool.slice(0, jobs);
};

const sleepUntil = async (at) => {
  const wait = (at - now()) / 1e6;
  if (wait > 0) await sleep(wait);
};

export class Service {
  constructor(adapter) {
    this.adapter = adapter;
    this.made = 0;
    this.began = [];
    this.expect(0);
  }

  // Producer

  settings() {
    return this.adapter.settings();
  }

  install({ dsn }) {
    return this.adapter.install(dsn);
  }

  connect({ dsn }) {
    return this.adapter.connect(dsn);
  }

  async load({ jobs, batch }) {
    const pool = this.pool();
    const first = now();
    for (let done = 0; done < jobs; done += batch)
      await this.adapter.insert(sliceOf(pool, done, Math.min(batch, jobs - done)));
    return { jobs, first, last: now() };
  }

  async produce({ seconds, batch, at }) {
    const pool = this.pool();
    await this.adapter.insert(sliceOf(pool, 0, batch));
    await sleepUntil(at);
    const first = now();
    const end = at + seconds * 1e9;
    let jobs = 0;
    while (now() < end) {
      await this.adapter.insert(sliceOf(pool, jobs, batch));
      jobs += batch;
    }
    return { jobs, first, last: now() };
  }

  async steady({ jobs, rate, batch = 1, fail_every = 0 }) {
    const first = now();
    for (let done = 0; done < jobs; done += batch) {
      await sleepUntil(first + (done / rate) * 1e9);
      const start = now();
      const all = [];
      for (let i = done; i < Math.min(done + batch, jobs); i++)
        all.push(this.args({ start, ...(fail_every && i % fail_every === 0 ? { fail: 1 } : {}) }));
      await this.adapter.insert(all);
    }
    return { jobs, first, last: now() };
  }

  async warm_up({ rate }) {
    await this.steady({ jobs: WARM_UP_JOBS, rate });
  }

  async hold() {
    await this.adapter.insert([this.args({ start: now(), hold: 1 })]);
  }

  async backlog({ jobs }) {
    const pool = this.pool();
    for (let done = 0; done < jobs; done += POOL)
      await this.adapter.backlog(sliceOf(pool, 0, Math.min(POOL, jobs - done)));
  }

  // Worker

  async drain({ dsn, jobs, concurrency = 0, wait_ms = 0 }) {
    this.expect(jobs);
    const first = now();
    await this.adapter.start(dsn, this.handler(wait_ms), concurrency);
    await this.allDone;
    await this.adapter.settle();
    const last = now();
    await this.adapter.stop();
    return { jobs: this.count, first, last };
  }

  async work({ dsn, concurrency = 0, wait_ms = 0 }) {
    this.expect(0);
    await this.adapter.start(dsn, this.handler(wait_ms), concurrency);
  }

  async record({ dsn, concurrency = 0 }) {
    this.expect(0);
    await this.adapter.start(dsn, this.recorder(), concurrency);
  }

  handled() {
    return { jobs: this.count, last: this.last };
  }

  async next_began() {
    while (!this.began.length) await sleep(1);
    return this.began.shift();
  }

  all_began() {
    return this.began.splice(0);
  }

  claim_times() {
    return [];
  }

  async stop() {
    this.letGo();
    await this.adapter.stop();
    return this.handled();
  }

  // Handlers

  expect(jobs) {
    this.count = 0;
    this.last = 0;
    this.expected = jobs;
    this.allDone = new Promise((resolve) => (this.finish = resolve));
    this.holding = new Promise((resolve) => (this.letGo = resolve));
  }

  done() {
    this.count += 1;
    if (this.count === this.expected) this.finish();
  }

  handler(waitMs) {
    if (!waitMs) return async () => this.done();
    return async () => {
      await sleep(waitMs);
      this.last = now();
      this.done();
    };
  }

  recorder() {
    return async (args, attempt) => {
      const at = now();
      const isRepeated = args.fail && attempt > 1;
      if (!isRepeated) this.began.push([args.start, at]);
      if (args.hold) await this.holding;
      if (args.fail && !isRepeated) throw new Error("the first attempt of this job fails");
      this.done();
    };
  }

  args(more = {}) {
    const value = { i: ++this.made, ...more, pad: "" };
    // As Python writes JSON: a space after each comma and colon.
    const length = JSON.stringify(value).length + 2 * Object.keys(value).length - 1;
    value.pad = "x".repeat(ARGS_BYTES - length);
    return value;
  }

  pool() {
    return Array.from({ length: POOL }, () => this.args());
  }
}

export const serve = async (adapter) => {
  const service = new Service(adapter);
  // What packages print is not an answer.
  console.log = console.info = console.error;
  for await (const line of createInterface({ input: process.stdin })) {
    const { do: name, ...rest } = JSON.parse(line);
    let answer;
    try {
      answer = { ok: (await service[name](rest)) ?? null };
    } catch (error) {
      console.error(error);
      answer = { error: `${error.name}: ${error.message}` };
    }
    writeSync(1, JSON.stringify(answer) + "\n");
  }
  await adapter.stop();
  process.exit(0);
};
