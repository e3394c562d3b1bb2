// Where the gateway is, and what clients ask the real model: the same as python/asked.py.
import { z } from 'zod'

export const BASE_URL = `${process.env.INFLIGHT_CLIENTS_URL}/v1`
export const KEY = process.env.INFLIGHT_CLIENTS_KEY
export const MODEL = 'smollm2'
export const SECONDS = 300

export const CAPITAL = 'What is the capital of France?'
export const PARIS = 'The capital of France is Paris.'
export const CHAT = [{ role: 'user', content: CAPITAL }]
export const RAIN = [{ role: 'user', content: 'Write a story about rain.' }]
export const PERSON = 'Tom is a baker. He is 42 years old. Write it as JSON.'
export const ROME = 'What is the weather in Rome for 3 days?'

export const Person = z.object({
  name: z.string().max(20),
  age: z.number().int().min(0).max(150),
  job: z.enum(['baker', 'pilot', 'nurse']),
})
export const Weather = z.object({
  city: z.enum(['Oslo', 'Paris', 'Rome']),
  days: z.number().int().min(1).max(9),
})
