// Handlers of the kinds that `awa conformance` enqueues, for worker.js.
'use strict'
const { setTimeout: sleep } = require('node:timers/promises')

module.exports = {
  async conformance_succeed() {},
  async conformance_echo(args) { return { outcome: 'completed', result: args } },
  async conformance_raise() { throw new Error('no luck') },
  async conformance_retry() { return { outcome: 'retry', delay_seconds: 0, error: 'not yet' } },
  async conformance_snooze() { return { outcome: 'snooze', delay_seconds: 600 } },
  async conformance_cancel() { return { outcome: 'cancel', reason: 'not needed' } },
  async conformance_fail() { return { outcome: 'fail', reason: 'hopeless' } },
  async conformance_sleep({ seconds }) { await sleep(seconds * 1000) },
}
