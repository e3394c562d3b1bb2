// Vercel's AI SDK with its provider for OpenAI-compatible servers.
import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { APICallError, Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from 'ai'
import { CAPITAL, KEY, MODEL, PARIS, PERSON, Person, ROME, BASE_URL, Weather } from './asked.mjs'

const provider = (apiKey = KEY) =>
  createOpenAICompatible({
    name: 'inflight', baseURL: BASE_URL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
  })
const model = provider()(MODEL)
const greedy = { model, temperature: 0, maxOutputTokens: 24, maxRetries: 0 }
const longer = { ...greedy, maxOutputTokens: 200 }
const weather = tool({
  description: 'The weather in a city', inputSchema: Weather, execute: async ({ city }) => `${city}: sunny`,
})

describe('text', () => {
  test('a chat', async () => {
    const answer = await generateText({ prompt: CAPITAL, ...greedy })
    assert.equal(answer.text, PARIS)
    assert.equal(answer.finishReason, 'stop')
  })

  test('a completion', async () => {
    const answer = await generateText({
      ...greedy, model: provider().completionModel(MODEL), prompt: 'The capital of France is',
    })
    assert.match(answer.text, /Paris/)
  })
})

describe('streaming', () => {
  test('the pieces are the whole answer', async () => {
    let text = ''
    for await (const piece of streamText({ prompt: CAPITAL, ...greedy }).textStream) text += piece
    assert.equal(text, PARIS)
  })
})

describe('tools', () => {
  test('a named tool is called, and its result goes back', async () => {
    const answer = await generateText({
      prompt: ROME, tools: { weather }, ...longer, toolChoice: { type: 'tool', toolName: 'weather' },
    })
    assert.equal(answer.toolCalls[0].input.city, 'Rome')
    assert.equal(answer.toolResults[0].output, 'Rome: sunny')
    const messages = [{ role: 'user', content: ROME }, ...answer.response.messages]
    assert.ok((await generateText({ messages, ...greedy })).text)
  })

  test('steps end', async () => {
    const answer = await generateText({
      prompt: ROME, tools: { weather }, ...longer, toolChoice: { type: 'tool', toolName: 'weather' },
      stopWhen: stepCountIs(2),
    })
    assert.equal(answer.steps.length, 2)
    assert.equal(answer.steps[0].toolCalls[0].toolName, 'weather')
  })

  test('a streamed call', async () => {
    const stream = streamText({ prompt: ROME, tools: { weather }, ...longer, toolChoice: 'required' })
    const [call] = await stream.toolCalls
    assert.ok(['Oslo', 'Paris', 'Rome'].includes(call.input.city))
  })
})

describe('structured output', () => {
  test('an object', async () => {
    assert.equal((await generateObject({ prompt: PERSON, schema: Person, ...longer })).object.age, 42)
  })

  test('a streamed object', async () => {
    const stream = streamObject({ prompt: PERSON, schema: Person, ...longer })
    let last
    for await (const partial of stream.partialObjectStream) last = partial // nothing is read without a reader
    assert.deepEqual(await stream.object, last)
    assert.equal(last.age, 42)
  })

  test('beside text', async () => {
    const answer = await generateText({ prompt: PERSON, output: Output.object({ schema: Person }), ...longer })
    assert.equal(answer.output.job, 'baker')
  })
})

describe('sampling', () => {
  test('a seed repeats, and a stop string ends', async () => {
    const warm = { ...greedy, temperature: 1, seed: 5, prompt: 'Write a story about rain.' }
    assert.equal((await generateText(warm)).text, (await generateText(warm)).text)
    const stopped = await generateText({ prompt: CAPITAL, stopSequences: [' is'], ...greedy })
    assert.equal(stopped.text, 'The capital of France')
  })
})

describe('usage', () => {
  test('whole and streamed', async () => {
    const { usage } = await generateText({ prompt: CAPITAL, ...greedy })
    assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens)
    const stream = streamText({ prompt: CAPITAL, ...greedy })
    assert.equal((await stream.usage).outputTokens, usage.outputTokens)
  })
})

describe('errors', () => {
  test('they have the status and the message', async () => {
    const status = (expected) => (error) => APICallError.isInstance(error) && error.statusCode === expected
    const ask = (body) => generateText({ prompt: CAPITAL, ...greedy, ...body })
    await assert.rejects(ask({ model: provider()('gpt-4') }), status(404))
    await assert.rejects(ask({ model: provider('wrong')(MODEL) }), status(401))
    await assert.rejects(ask({ temperature: -1 }), status(400))
  })
})

describe('cancellation', () => {
  test('an abort', async () => {
    const abortSignal = AbortSignal.timeout(1000)
    const providerOptions = { inflight: { ignore_eos: true } } // keys of the body
    const ask = generateText({ ...greedy, prompt: 'Count to 1000.', maxOutputTokens: 3000, providerOptions, abortSignal })
    await assert.rejects(ask, { name: /AbortError|TimeoutError/ })
  })
})
