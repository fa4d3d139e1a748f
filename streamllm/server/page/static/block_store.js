// What the server has told of its KV blocks: the state of each, and who holds it where.

export const KNOWN = 4;
export const NAMES = ["free", "cached", "one owner", "shared"];
const NO_BLOCK = -1;

/** A state of the stream (holders 0, 1, more; plus KNOWN) as an index into NAMES. */
export function kind(state) {
  const holders = state & 3;
  return holders ? holders + 1 : state & KNOWN ? 1 : 0;
}

export class BlockStore {
  constructor() {
    this.reset(0, 0);
  }

  reset(numBlocks, blockSize) {
    this.blockSize = blockSize;
    this.states = new Uint8Array(numBlocks);
    this.counts = [numBlocks, 0, 0, 0];
    /** sequence -> {request, choice, tables} */
    this.sequences = new Map();
    /** block -> sequence -> place in its table */
    this.owners = new Map();
  }

  /** Takes news in; returns the blocks to draw anew. */
  take({ runs, sequences, tables, gone }) {
    const changed = new Set();
    for (const [first, count, state] of runs) {
      for (let block = first; block < first + count; block += 1) {
        this.counts[kind(this.states[block])] -= 1;
        this.counts[kind(state)] += 1;
        this.states[block] = state;
        changed.add(block);
      }
    }
    for (const id of gone) {
      this.sequences.get(id).tables.forEach((table) => this.#disown(id, table));
      this.sequences.delete(id);
    }
    for (const [id, request, choice] of sequences) this.sequences.set(id, { request, choice, tables: [] });
    for (const [id, group, first, blocks] of tables) {
      const table = (this.sequences.get(id).tables[group] ??= []);
      this.#disown(id, table.splice(first));
      table.push(...blocks);
      blocks.forEach((block, index) => this.#own(id, block, first + index));
    }
    return changed;
  }

  /** Who holds a block: [{request, choice, place, sequence}]. */
  holders(block) {
    return [...(this.owners.get(block) ?? [])].map(([sequence, place]) => {
      const { request, choice } = this.sequences.get(sequence);
      return { request, choice, place, sequence };
    });
  }

  /** All blocks of the sequences that hold a block. */
  relatives(block) {
    const blocks = new Set();
    for (const id of this.owners.get(block)?.keys() ?? []) {
      for (const table of this.sequences.get(id).tables) table.forEach((each) => blocks.add(each));
    }
    blocks.delete(NO_BLOCK);
    return blocks;
  }

  #own(id, block, place) {
    if (block === NO_BLOCK) return;
    if (!this.owners.has(block)) this.owners.set(block, new Map());
    this.owners.get(block).set(id, place);
  }

  #disown(id, blocks) {
    for (const block of blocks) {
      const owners = this.owners.get(block);
      owners?.delete(id);
      if (owners?.size === 0) this.owners.delete(block);
    }
  }
}
