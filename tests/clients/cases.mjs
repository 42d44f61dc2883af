// What the client programs for node share. A program prints a JSON line for each case.
import { strict as assert } from "node:assert";

export { assert };
export const { SCRIPT_URL, NATIVE_URL } = process.env;
export const KEY = "any";
export const QUESTION = "What is the capital of France?";
export const WEATHER = "What is the weather in Paris?";
export const REASONING = "I need data.";
export const ANSWER = "It is 18 degrees in Paris.";
export const EMBEDDING_MODEL = "all-MiniLM-L6-v2";
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const PERSON = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 12 },
    age: { type: "integer", minimum: 0, maximum: 120 },
  },
  required: ["name", "age"],
  additionalProperties: false,
};

export function assertPerson(person) {
  assert.deepEqual(Object.keys(person).sort(), ["age", "name"]);
  assert(person.name.length <= 12 && Number.isInteger(person.age));
}

export async function run(cases) {
  for (const [name, work] of Object.entries(cases)) {
    let error = null;
    try {
      await work();
    } catch (caught) {
      error = `${caught?.stack ?? caught} ${caught?.responseBody ?? ""}`;
    }
    console.log(JSON.stringify({ case: name, error }));
  }
}
