// What every client asks, and of which server: PENSTOCK_URL (without /v1), PENSTOCK_MODEL, PENSTOCK_KEY.
import { z } from "zod";

export const url = process.env.PENSTOCK_URL;
export const model = process.env.PENSTOCK_MODEL;
export const key = process.env.PENSTOCK_KEY ?? "none";
// The built-in model's answers are known; another one need only keep to the form.
export const demo = model === "penstock-demo";

export const SUM = "What is 17 + 25?";
export const OSLO = "What is the weather in Oslo?";
export const ANNA = "Extract name, age as JSON: Anna is 36 years old, lives in Oslo and works as a baker.";
export const TOO_LONG = "word ".repeat(20_000);
export const MAX_TOKENS = 120;

export const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
export const City = z.object({ city: z.string() });
export const Minutes = z.object({ minutes: z.number().int().min(1).max(99) });
export const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const WEATHER = "Get the current weather of a city.";
export const TIMER = "Start a timer.";

// A tool whose first two results are what to ask next, so that a loop makes three calls.
export class Weather {
  cities = [];

  ask(city) {
    this.cities.push(city);
    const next = ["What is the weather in Vienna?", "What is the weather in Rome?"];
    return next[this.cities.length - 1] ?? "rain";
  }

  // With the city of each question, to which the built-in model may add something.
  calledThreeTimes() {
    const wanted = ["Oslo", "Vienna", "Rome"];
    return this.cities.length === 3 && wanted.every((city, at) => this.cities[at].startsWith(city));
  }
}
