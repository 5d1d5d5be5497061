//! What model responses cost, and how many tokens they took.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::json::{self, Cursor, Document, Members, Stop};
use super::money::Usd;

/// Token counts by type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Tokens {
    /// Input that was neither read from nor written to a cache.
    pub input: u64,
    /// Output.
    pub output: u64,
    /// Input read from a cache.
    pub cache_read: u64,
    /// Input written to a cache.
    pub cache_creation: u64,
}

impl Tokens {
    /// The names of the types, in the order of [`Tokens::counts`].
    pub const TYPES: [&str; 4] = ["input", "output", "cache_read", "cache_creation"];

    /// The counts in the order of [`Tokens::TYPES`].
    #[must_use]
    pub const fn counts(&self) -> [u64; 4] {
        [self.input, self.output, self.cache_read, self.cache_creation]
    }

    /// Adds the other's counts.
    pub fn merge(&mut self, other: &Self) {
        self.input = self.input.saturating_add(other.input);
        self.output = self.output.saturating_add(other.output);
        self.cache_read = self.cache_read.saturating_add(other.cache_read);
        self.cache_creation = self.cache_creation.saturating_add(other.cache_creation);
    }
}

/// One model response.
#[derive(Debug, Default)]
pub(super) struct Entry<'a> {
    id: Option<Cow<'a, str>>,
    model: Option<Cow<'a, str>>,
    provider: Option<Cow<'a, str>>,
    cost: ReportedCost,
    usage: Option<Usage>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum ReportedCost {
    #[default]
    Absent,
    Usable(Usd),
    Unusable,
}

/// The tokens of an entry that is an object.
#[derive(Debug, Default)]
struct Usage {
    tokens: Tokens,
    /// Whether at least one count was given.
    given: bool,
    /// Whether every count that was given could be read.
    known: bool,
}

/// More model responses than this in one record are not believed. Without a limit a long line could take many times its
/// length in memory, because of all its entries only the last with each id counts.
const MAX_ENTRIES: usize = 10_000;

/// Reads a record's `spend`, which begins at the cursor: its entries, of several with the same id only the last.
pub(super) fn entries<'a>(spend: &mut Cursor<'_, 'a>) -> Vec<Entry<'a>> {
    let mut entries = Vec::new();
    let mut push = |cursor: &mut Cursor<'_, 'a>| {
        let entry = Entry::read(cursor)?;
        if entries.len() <= MAX_ENTRIES {
            entries.push(entry);
        }
        Ok(())
    };
    // The line is valid JSON, so there is nothing that could stop the cursor.
    let read = if spend.is_at_array() { spend.elements(&mut push) } else { push(spend) };
    debug_assert!(read.is_ok());
    if entries.len() > MAX_ENTRIES {
        return vec![Entry { cost: ReportedCost::Unusable, ..Entry::default() }];
    }
    if entries.len() > 1 {
        let mut seen = BTreeSet::new();
        entries.reverse();
        entries.retain(|entry: &Entry<'_>| entry.id.as_ref().is_none_or(|id| seen.insert(id.clone())));
        entries.reverse();
    }
    entries
}

impl<'a> Entry<'a> {
    fn read(cursor: &mut Cursor<'_, 'a>) -> Result<Self, Stop> {
        if !cursor.is_at_object() {
            let amount = Usd::parse(cursor.text()?);
            return Ok(Self { cost: ReportedCost::of(amount), ..Self::default() });
        }
        let members = cursor.members(index)?;
        Ok(Self {
            id: text(&members, ID).filter(|id| !id.is_empty()),
            model: text(&members, MODEL),
            provider: text(&members, PROVIDER),
            cost: members.get(COST_USD).map_or(ReportedCost::Absent, |cost| ReportedCost::of(amount(cost))),
            usage: Some(Usage::read(&members)),
        })
    }

    /// The model and the tokens it took, unless the entry is a bare amount.
    pub(super) fn tokens(&self) -> Option<(&str, Tokens)> {
        self.usage.as_ref().map(|usage| (self.model.as_deref().unwrap_or_default(), usage.tokens))
    }

    /// What it cost; `None` if that isn't known.
    pub(super) fn cost(&self, prices: &Prices) -> Option<Usd> {
        match self.cost {
            ReportedCost::Usable(Usd::ZERO) => {
                let no_tokens = |usage: &Usage| usage.known && usage.tokens == Tokens::default();
                let free = self.usage.as_ref().is_none_or(no_tokens) || self.price(prices) == Some(Usd::ZERO);
                free.then_some(Usd::ZERO)
            }
            ReportedCost::Usable(cost) => Some(cost),
            ReportedCost::Unusable => None,
            ReportedCost::Absent => self.price(prices),
        }
    }

    fn price(&self, prices: &Prices) -> Option<Usd> {
        let usage = self.usage.as_ref().filter(|usage| usage.known && usage.given)?;
        let model = prices.model(self.model.as_deref()?, self.provider.as_deref())?;
        model.cost(&usage.tokens)
    }
}

impl ReportedCost {
    fn of(amount: Option<Usd>) -> Self {
        amount.filter(|cost| *cost <= Usd::MAX_COST).map_or(Self::Unusable, Self::Usable)
    }
}

/// An amount of USD from a JSON number, or from a string that holds one.
fn amount(json: &str) -> Option<Usd> {
    match json::string(json) {
        Some(text) => Usd::parse(&text.text),
        None => Usd::parse(json),
    }
}

fn text<'a>(members: &Members<'a, FIELDS>, index: usize) -> Option<Cow<'a, str>> {
    members.string(index).map(|text| text.text)
}

const ID: usize = 0;
const MODEL: usize = 1;
const PROVIDER: usize = 2;
const COST_USD: usize = 3;
const INPUT: usize = 4;
const OUTPUT: usize = 5;
const CACHE_READ: usize = 6;
const CACHE_CREATION: usize = 7;
const PROMPT: usize = 8;
const COMPLETION: usize = 9;
const PROMPT_DETAILS: usize = 10;
const INPUT_DETAILS: usize = 11;

const FIELDS: usize = 12;

fn index(key: &[u8]) -> Option<usize> {
    Some(match key {
        b"id" => ID,
        b"model" => MODEL,
        b"provider" => PROVIDER,
        b"cost_usd" => COST_USD,
        b"input_tokens" => INPUT,
        b"output_tokens" => OUTPUT,
        b"cache_read_input_tokens" => CACHE_READ,
        b"cache_creation_input_tokens" => CACHE_CREATION,
        b"prompt_tokens" => PROMPT,
        b"completion_tokens" => COMPLETION,
        b"prompt_tokens_details" => PROMPT_DETAILS,
        b"input_tokens_details" => INPUT_DETAILS,
        _ => return None,
    })
}

impl Usage {
    fn read(members: &Members<'_, FIELDS>) -> Self {
        let mut usage = Self { known: true, ..Self::default() };
        let is_openai = members.get(INPUT).is_none() && members.get(PROMPT).is_some();
        let (whole, details) = if is_openai { (PROMPT, PROMPT_DETAILS) } else { (INPUT, INPUT_DETAILS) };

        let output = usage.count(members.get(OUTPUT).or(members.get(COMPLETION)));
        // The subset of a whole that isn't there means nothing.
        let details = members
            .get(whole)
            .and(members.get(details))
            .and_then(|details| Document::new(details).object::<1>(|key| (key == b"cached_tokens").then_some(0)).ok());
        let cached = usage.count(details.and_then(|details| details.get(0)));
        let cache_read = usage.count(members.get(CACHE_READ));
        let cache_creation = usage.count(members.get(CACHE_CREATION));

        let included = match (is_openai, cached) {
            (true, _) => cached.or(cache_read).unwrap_or(0).saturating_add(cache_creation.unwrap_or(0)),
            (false, Some(cached)) => cached,
            (false, None) => 0,
        };
        let input = usage.count(members.get(whole)).unwrap_or(0).checked_sub(included);
        usage.known &= input.is_some();
        usage.tokens = Tokens {
            input: input.unwrap_or(0),
            output: output.unwrap_or(0),
            cache_read: cached.or(cache_read).unwrap_or(0),
            cache_creation: cache_creation.unwrap_or(0),
        };
        usage
    }

    fn count(&mut self, json: Option<&str>) -> Option<u64> {
        let json = json?;
        let count = json.parse().ok();
        self.given |= count.is_some();
        self.known &= count.is_some();
        count
    }
}

/// Prices of models, in `LiteLLM`'s format.
#[derive(Debug, Default)]
pub struct Prices(HashMap<String, ModelPrices>);

/// USD for one token of each type, in the order of [`Tokens::TYPES`].
#[derive(Debug, Default)]
struct ModelPrices {
    base: [Option<Usd>; 4],
    /// Prices for requests with more input than so many tokens, and for which type; the largest first.
    above: Vec<(u64, usize, Option<Usd>)>,
}

const PRICE_NAMES: [&str; 4] =
    ["input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost", "cache_creation_input_token_cost"];

/// Why a price map could not be read.
#[derive(Debug)]
pub enum PricesError {
    /// It is not one JSON object.
    Json(serde_json::Error),
    /// No model in it has a usable price.
    NoPrices,
}

impl fmt::Display for PricesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => write!(f, "not a price map: {error}"),
            Self::NoPrices => write!(f, "not a price map: no model has a usable {}", PRICE_NAMES.join(", ")),
        }
    }
}

impl std::error::Error for PricesError {}

impl Prices {
    /// Reads a price map.
    ///
    /// # Errors
    /// If it isn't one JSON object, or has no price. Models in it that make no sense have no price.
    pub fn parse(json: &[u8]) -> Result<Self, PricesError> {
        let models: HashMap<String, &RawValue> = serde_json::from_slice(json).map_err(PricesError::Json)?;
        let models: HashMap<_, _> = models
            .into_iter()
            .filter(|(_, prices)| prices.get().starts_with('{'))
            .map(|(name, prices)| (name, ModelPrices::read(prices.get())))
            .collect();
        if !models.values().any(ModelPrices::is_any_usable) {
            return Err(PricesError::NoPrices);
        }
        Ok(Self(models))
    }

    fn model(&self, model: &str, provider: Option<&str>) -> Option<&ModelPrices> {
        provider.and_then(|provider| self.0.get(&format!("{provider}/{model}"))).or_else(|| self.0.get(model))
    }
}

impl ModelPrices {
    fn read(json: &str) -> Self {
        let members: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_str(json).unwrap_or_default();
        let mut prices = Self::default();
        for (name, price) in members.into_iter().filter(|(_, price)| price.get() != "null") {
            let Some(index) = PRICE_NAMES.iter().position(|price_name| name.starts_with(price_name)) else { continue };
            let price = Usd::parse(price.get()).filter(|price| *price <= Usd::MAX_COST);
            let suffix = &name[PRICE_NAMES[index].len()..];
            if suffix.is_empty() {
                prices.base[index] = price;
            } else if let Some(thousands) = suffix.strip_prefix("_above_").and_then(|s| s.strip_suffix("k_tokens"))
                && thousands.bytes().all(|byte| byte.is_ascii_digit())
                && let Some(tokens) = thousands.parse::<u64>().ok().and_then(|n| n.checked_mul(1_000))
            {
                prices.above.push((tokens, index, price));
            }
        }
        prices.above.sort_by_key(|(tokens, ..)| std::cmp::Reverse(*tokens));
        prices
    }

    fn is_any_usable(&self) -> bool {
        self.base.iter().chain(self.above.iter().map(|(.., price)| price)).any(Option::is_some)
    }

    fn cost(&self, tokens: &Tokens) -> Option<Usd> {
        let input = tokens.input.saturating_add(tokens.cache_read).saturating_add(tokens.cache_creation);
        let mut cost = Usd::ZERO;
        for (index, count) in tokens.counts().into_iter().enumerate().filter(|(_, count)| *count > 0) {
            let above = self.above.iter().find(|(above, of, _)| *of == index && input > *above);
            let price = above.map_or(self.base[index], |(.., price)| *price)?;
            cost = cost.checked_add(price.checked_mul(count)?)?;
        }
        Some(cost)
    }
}
