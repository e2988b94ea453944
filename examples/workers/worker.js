// A worker in Node with the `pg` package: several jobs at once, woken by NOTIFY.
//
//   AWA_DSN=postgresql:///app AWA_QUEUE=default node worker.js ./HANDLERS.js
//
// HANDLERS.js exports an async function for each kind: (args, {signal}) => outcome. It returns nothing when the
// job is completed, or the outcome as finish_jobs takes it; what it throws means a retry. `signal` is aborted when
// the job was cancelled or taken away.
'use strict'
const { randomUUID } = require('node:crypto')
const path = require('node:path')
const { setTimeout: sleep } = require('node:timers/promises')
const pg = require('pg')

const handlers = require(path.resolve(process.argv[2]))
const queue = process.env.AWA_QUEUE || 'default'
const concurrency = Number(process.env.AWA_CONCURRENCY || 10)
const me = randomUUID()
const schemaVersion = 2 // the one this worker was written for; a later one will do
const config = { connectionString: process.env.AWA_DSN }
const pool = new pg.Pool({ ...config, max: 4 })
pool.on('error', (error) => console.error(`connection lost: ${error.message}`))

const running = new Map() // place of an attempt -> AbortController
let stopping = false
let wake = () => {}

// bigint comes from pg as text, and goes back as text: a double could not hold it.
async function call(query, ...params) {
  for (;;) {
    try {
      return (await pool.query(query, params)).rows
    } catch (error) {
      if (error.severity === 'ERROR') throw error // a mistake, no lost connection
      console.error(`trying again: ${error.message}`)
      await sleep(500)
    }
  }
}

async function outcomeOf(job, signal) {
  if (!Object.hasOwn(handlers, job.kind)) return { outcome: 'released', reason: 'unknown_kind' }
  try {
    return (await handlers[job.kind](job.args, { signal })) || { outcome: 'completed' }
  } catch (error) {
    return { outcome: 'retry', error: String(error) }
  }
}

async function finish(item) {
  try {
    return (await call('SELECT result, reason FROM awa.finish_jobs($1, $2)', me, JSON.stringify([item])))[0]
  } catch (error) { // no JSON
    return { result: 'invalid', reason: error.message }
  }
}

async function run(job) {
  const place = [job.claim_slot, job.batch_id, job.position].join()
  const controller = new AbortController()
  running.set(place, controller)
  const { job_id, run_lease, claim_slot, batch_id, position } = job
  let outcome = await outcomeOf(job, controller.signal)
  for (;;) {
    const { result, reason } = await finish({ job_id, run_lease, claim_slot, batch_id, position, ...outcome })
    if (result === 'invalid') outcome = { outcome: 'retry', error: `the outcome was refused: ${reason}` }
    else if (result !== 'busy') break // also stale: another worker has the job by now, or it was cancelled
    await sleep(100)
  }
  running.delete(place)
  wake()
}

async function beat() {
  const [{ cancelled }] = await call('SELECT cancelled FROM awa.heartbeat($1)', me)
  for (const c of cancelled || []) running.get([c.claim_slot, c.batch_id, c.position].join())?.abort()
  await call('SELECT FROM awa.tick()')
}

let listener
async function listen(channel) {
  if (listener) return
  const client = new pg.Client(config)
  client.on('error', () => { listener = undefined; wake() })
  client.on('notification', ({ payload }) => (payload === 'cancel' ? beat() : wake()))
  await client.connect()
  listener = client
  await client.query(`LISTEN ${client.escapeIdentifier(channel)}`)
}

async function sleepUntilWork() {
  const woken = new Promise((resolve) => { wake = resolve })
  let full = running.size >= concurrency
  let wait = 1000
  if (!full) {
    let [status] = await call('SELECT * FROM awa.claim_status($1, arm => true)', queue)
    if (status.channel && !listener) {
      await listen(status.channel).catch((error) => console.error(`polling: ${error.message}`))
      ;[status] = await call('SELECT * FROM awa.claim_status($1, arm => true)', queue)
    }
    if (status.reason === 'ready') return
    wait = status.retry_after_ms
  }
  const timer = new AbortController()
  await Promise.race([woken, sleep(wait, undefined, { signal: timer.signal }).catch(() => {})])
  timer.abort()
}

async function main() {
  for (const name of ['SIGTERM', 'SIGINT']) process.on(name, () => { stopping = true; wake() })
  const [schema] = await call('SELECT awa.schema_version() AS number')
  if (schema.number < schemaVersion) throw new Error('JQ006: the database has an older awa: run `awa upgrade`')
  await call('SELECT awa.register_instance($1, $2)', me, '{"client": "node"}')
  const beating = setInterval(beat, 1000)
  while (!stopping) {
    const free = concurrency - running.size
    const claim = 'SELECT * FROM awa.claim_ready_runtime($1, $2, $3)'
    const jobs = free > 0 ? await call(claim, queue, free, me) : []
    jobs.forEach(run)
    if (jobs.length < free || free === 0) await sleepUntilWork()
  }
  while (running.size > 0) await sleep(20)
  clearInterval(beating)
  await listener?.end()
  await pool.end()
}

main().catch((error) => { console.error(error); process.exit(1) })
