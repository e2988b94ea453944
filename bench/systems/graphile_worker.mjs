// graphile-worker, set up as its own page on performance does.

import { connection, load, serve, version, waitUntilEmpty } from "./protocol.mjs";

const { default: worker } = await load("graphile-worker");
const { default: pg } = await load("pg");

const KIND = "noop";
const HELD_KIND = "held"; // a task that no worker knows, as there is no paused queue
const SETTINGS = {
  concurrentJobs: 24,
  maxPoolSize: 25,
  localQueue: { size: 500 },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
};
const IS_BUSY = `
  SELECT EXISTS (SELECT FROM graphile_worker._private_jobs j
    JOIN graphile_worker._private_tasks t ON t.id = j.task_id WHERE t.identifier = '${KIND}') AS busy`;
const logger = new worker.Logger(() => () => {});

class GraphileWorker {
  settings() {
    const { localQueue, ...rest } = SETTINGS;
    return { version: version("graphile-worker"), ...rest, localQueueSize: localQueue.size };
  }

  async install(dsn) {
    const pgPool = new pg.Pool(connection(dsn));
    await worker.runMigrations({ pgPool, logger });
    await pgPool.end();
  }

  async connect(dsn) {
    this.pool = new pg.Pool({ ...connection(dsn), max: 1 });
    this.utils = await worker.makeWorkerUtils({ pgPool: this.pool, logger });
  }

  insert(jobs) {
    return jobs.length === 1
      ? this.utils.addJob(KIND, jobs[0])
      : this.utils.addJobs(jobs.map((payload) => ({ identifier: KIND, payload })));
  }

  backlog(jobs) {
    return this.utils.addJobs(jobs.map((payload) => ({ identifier: HELD_KIND, payload })));
  }

  async start(dsn, handler, concurrency) {
    const concurrentJobs = concurrency || SETTINGS.concurrentJobs;
    this.workerPool = new pg.Pool({ ...connection(dsn), max: SETTINGS.maxPoolSize });
    this.workerPool.on("error", () => {});
    this.runner = await worker.run({
      pgPool: this.workerPool,
      logger,
      noHandleSignals: true,
      preset: { worker: { ...SETTINGS, concurrentJobs } },
      taskList: { [KIND]: (payload, helpers) => handler(payload, helpers.job.attempts) },
    });
  }

  settle() {
    return waitUntilEmpty(async () => (await this.workerPool.query(IS_BUSY)).rows[0].busy);
  }

  async stop() {
    if (!this.runner) return;
    const runner = this.runner;
    this.runner = undefined;
    await runner.stop();
    await this.workerPool.end();
  }
}

await serve(new GraphileWorker());
