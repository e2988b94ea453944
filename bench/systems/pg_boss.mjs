// pg-boss: insert() for batches, large batches and NOTIFY for the worker.

import { connection, load, serve, version, waitUntilEmpty } from "./protocol.mjs";

const { PgBoss } = await load("pg-boss");

const QUEUE = "noop";
const SETTINGS = {
  batchSize: 500,
  localConcurrency: 2,
  pollingIntervalSeconds: 0.5,
  burstWhenBatchFull: true,
};
const IS_BUSY = `
  SELECT EXISTS (SELECT FROM pgboss.job WHERE name = '${QUEUE}' AND state < 'completed') AS busy`;
const make = async (dsn, options) => {
  const boss = new PgBoss({ ...connection(dsn), schedule: false, ...options });
  boss.on("error", console.error);
  await boss.start();
  return boss;
};

class Boss {
  settings() {
    return { version: version("pg-boss"), ...SETTINGS, notify: 1 };
  }

  async install(dsn) {
    const boss = await make(dsn, { supervise: false });
    await boss.createQueue(QUEUE, { notify: true });
    await boss.stop({ graceful: false });
  }

  async connect(dsn) {
    this.producer = await make(dsn, { supervise: false, max: 1 });
  }

  insert(jobs) {
    return jobs.length === 1
      ? this.producer.send(QUEUE, jobs[0])
      : this.producer.insert(QUEUE, jobs.map((data) => ({ data })));
  }

  async start(dsn, handler, concurrency) {
    this.worker = await make(dsn, { useListenNotify: true });
    const options = concurrency ? { ...SETTINGS, batchSize: concurrency, localConcurrency: 1 } : SETTINGS;
    await this.worker.work(QUEUE, options, (jobs) => Promise.all(jobs.map((job) => handler(job.data, 1))));
  }

  async settle() {
    const db = this.worker.getDb();
    await waitUntilEmpty(async () => (await db.executeSql(IS_BUSY)).rows[0].busy);
  }

  async stop() {
    if (!this.worker) return;
    const worker = this.worker;
    this.worker = undefined;
    await worker.stop({ graceful: true, timeout: 5000 });
  }
}

await serve(new Boss());
