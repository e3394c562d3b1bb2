// OpenAI's package for JavaScript.
import assert from 'node:assert/strict'
import { describe, test } from 'node:test'
import OpenAI from 'openai'
import { zodFunction, zodResponseFormat, zodTextFormat } from 'openai/helpers/zod'
import { CAPITAL, CHAT, KEY, MODEL, PARIS, PERSON, Person, RAIN, ROME, SECONDS, BASE_URL, Weather } from './asked.mjs'

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0, timeout: SECONDS * 1000 })
const greedy = { model: MODEL, temperature: 0, max_tokens: 24 }
const asJson = [{ role: 'user', content: PERSON }]
const askWeather = [{ role: 'user', content: ROME }]
const tools = [zodFunction({ name: 'weather', parameters: Weather })]
const named = { type: 'function', function: { name: 'weather' } }

describe('text', () => {
  test('a chat', async () => {
    const answer = await client.chat.completions.create({ messages: CHAT, ...greedy })
    assert.equal(answer.choices[0].message.content, PARIS)
    assert.equal(answer.choices[0].finish_reason, 'stop')
  })

  test('a completion', async () => {
    const answer = await client.completions.create({ prompt: 'The capital of France is', ...greedy })
    assert.match(answer.choices[0].text, /Paris/)
  })
})

describe('streaming', () => {
  test('the pieces are the whole answer', async () => {
    const whole = await client.chat.completions.create({ messages: RAIN, ...greedy })
    let text = ''
    for await (const chunk of await client.chat.completions.create({ messages: RAIN, stream: true, ...greedy })) {
      text += chunk.choices[0].delta.content ?? ''
    }
    assert.equal(text, whole.choices[0].message.content)
  })

  test('the helper that gathers events', async () => {
    const stream = client.chat.completions.stream({ messages: CHAT, ...greedy })
    assert.equal(await stream.finalContent(), PARIS)
  })
})

describe('tools', () => {
  test('a named tool there and back', async () => {
    const asked = { ...greedy, max_tokens: 100, tools }
    const answer = await client.chat.completions.parse({ messages: askWeather, tool_choice: named, ...asked })
    const [call] = answer.choices[0].message.tool_calls
    assert.equal(call.function.name, 'weather')
    assert.equal(call.function.parsed_arguments.city, 'Rome')
    const result = { role: 'tool', tool_call_id: call.id, content: 'sunny' }
    const messages = [...askWeather, answer.choices[0].message, result]
    const after = await client.chat.completions.create({ messages, tool_choice: 'none', ...asked, max_tokens: 24 })
    assert.ok(after.choices[0].message.content)
  })

  test('a streamed call', async () => {
    const asked = { ...greedy, max_tokens: 100, messages: askWeather, tools, tool_choice: named }
    const message = await client.chat.completions.stream(asked).finalMessage()
    assert.equal(JSON.parse(message.tool_calls[0].function.arguments).city, 'Rome')
  })
})

describe('structured output', () => {
  test('parse', async () => {
    const response_format = zodResponseFormat(Person, 'person')
    const answer = await client.chat.completions.parse({ messages: asJson, response_format, ...greedy, max_tokens: 200 })
    assert.equal(answer.choices[0].message.parsed.age, 42)
  })
})

describe('sampling', () => {
  test('a seed repeats, a stop string ends, and there are two choices', async () => {
    const warm = { messages: RAIN, ...greedy, temperature: 1, seed: 5, n: 2 }
    const [one, two] = [await client.chat.completions.create(warm), await client.chat.completions.create(warm)]
    const texts = (answer) => answer.choices.map((choice) => choice.message.content)
    assert.deepEqual(texts(one), texts(two))
    assert.notEqual(texts(one)[0], texts(one)[1])
    const stopped = await client.chat.completions.create({ messages: CHAT, stop: [' is'], ...greedy })
    assert.equal(stopped.choices[0].message.content, 'The capital of France')
  })
})

describe('log probabilities', () => {
  test('of each token', async () => {
    const answer = await client.chat.completions.create({ messages: CHAT, logprobs: true, top_logprobs: 2, ...greedy })
    for (const token of answer.choices[0].logprobs.content) assert.equal(token.top_logprobs.length, 2)
  })
})

describe('usage', () => {
  test('whole and streamed', async () => {
    const { usage } = await client.chat.completions.create({ messages: CHAT, ...greedy })
    assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    const asked = { messages: CHAT, stream: true, stream_options: { include_usage: true }, ...greedy }
    let last
    for await (const chunk of await client.chat.completions.create(asked)) last = chunk
    assert.equal(last.usage.completion_tokens, usage.completion_tokens)
  })
})

describe('errors', () => {
  test('they become the exceptions of the library', async () => {
    const ask = (body) => client.chat.completions.create({ messages: CHAT, ...greedy, ...body })
    await assert.rejects(ask({ model: 'gpt-4' }), OpenAI.NotFoundError)
    await assert.rejects(ask({ temperature: -1 }), OpenAI.BadRequestError)
    await assert.rejects(client.withOptions({ apiKey: 'wrong' }).models.list(), OpenAI.AuthenticationError)
  })
})

describe('cancellation', () => {
  const endless = { messages: RAIN, ...greedy, max_tokens: 3000, ignore_eos: true }

  test('a timeout', async () => {
    const ask = client.chat.completions.create(endless, { timeout: 1000 })
    await assert.rejects(ask, OpenAI.APIConnectionTimeoutError)
  })

  test('a stream that is aborted', async () => {
    const stream = await client.chat.completions.create({ ...endless, stream: true })
    let chunks = 0
    for await (const _ of stream) {
      chunks += 1
      stream.controller.abort()
    }
    assert.ok(chunks >= 1)
  })
})

describe('responses', () => {
  const asked = { model: MODEL, temperature: 0, max_output_tokens: 24 }

  test('text whole and streamed', async () => {
    const whole = await client.responses.create({ input: CAPITAL, ...asked })
    assert.equal(whole.output_text, PARIS)
    const stream = client.responses.stream({ input: CAPITAL, ...asked })
    assert.equal((await stream.finalResponse()).output_text, PARIS)
  })

  test('parse', async () => {
    const text = { format: zodTextFormat(Person, 'person') }
    const answer = await client.responses.parse({ input: PERSON, text, ...asked, max_output_tokens: 200 })
    assert.equal(answer.output_parsed.age, 42)
  })
})

describe('embeddings', () => {
  test('a list, in base64 and as numbers', async () => {
    const texts = ['Where is Paris?', 'It rains in spring.']
    const answer = await client.embeddings.create({ model: MODEL, input: texts })
    const plain = await client.embeddings.create({ model: MODEL, input: texts, encoding_format: 'float' })
    assert.deepEqual(answer.data.map((item) => item.embedding.length), [576, 576])
    for (const [i, item] of plain.data.entries()) {
      assert.ok(item.embedding.every((value, j) => Math.abs(value - answer.data[i].embedding[j]) < 1e-6))
    }
  })
})
