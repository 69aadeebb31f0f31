// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/args.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <string_view>

namespace kvm::bench::gpu {
namespace {

int missed = 0;

// A string between quotation marks. Device names and our own words: no control characters.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
    }
    out += c;
  }
  return out + '"';
}

// JSON has no infinity.
std::string number(double value) {
  if (!std::isfinite(value)) {
    return "null";
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", value);
  return text;
}

void print(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

}  // namespace

bool parse_args(int argc, char** argv, Args* out) {
  if (argc < 2) {
    std::fputs("no command\n", stderr);
    return false;
  }
  out->command = argv[1];
  out->help = out->command == "--help" || out->command == "-h" || out->command == "help";
  for (int i = 2; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--help" || argument == "-h") {
      out->help = true;
    } else if (argument == "--quick") {
      out->quick = true;
    } else if (argument == "--small") {
      out->small = true;
    } else if (argument == "--max-gib" && i + 1 < argc) {
      const std::string_view value = argv[++i];
      uint64_t gib = 0;
      if (std::from_chars(value.data(), value.data() + value.size(), gib).ec != std::errc{} ||
          gib == 0 || gib > 1024) {
        std::fprintf(stderr, "--max-gib is %s; it must be a number from 1 to 1024\n", argv[i]);
        return false;
      }
      out->max_bytes = gib << 30;
    } else if (argument == "--role" && i + 1 < argc) {
      out->role = argv[++i];
    } else if (argument.starts_with("--")) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return false;
    } else {
      out->rest.emplace_back(argument);
    }
  }
  return true;
}

bool print_bar(const Bar& bar) {
  const bool pass = bar.at_least ? bar.measured >= bar.limit : bar.measured <= bar.limit;
  missed += pass ? 0 : 1;
  print("{\"bar\":" + quoted(bar.bar) + ",\"case\":" + quoted(bar.name) +
        ",\"unit\":" + quoted(bar.unit) + ",\"measured\":" + number(bar.measured) +
        ",\"ceiling\":" + (bar.ceiling == 0 ? "null" : number(bar.ceiling)) +
        ",\"limit\":" + number(bar.limit) + ",\"pass\":" + (pass ? "true" : "false") + "}");
  return pass;
}

int bars_missed() { return missed; }

void print_figure(const std::string& probe, const std::string& name, const std::string& unit,
                  double value) {
  print("{\"probe\":" + quoted(probe) + ",\"case\":" + quoted(name) + ",\"unit\":" + quoted(unit) +
        ",\"measured\":" + number(value) + "}");
}

void print_fact(const std::string& probe, const std::string& name, const std::string& value) {
  print("{\"probe\":" + quoted(probe) + ",\"case\":" + quoted(name) +
        ",\"value\":" + quoted(value) + "}");
}

double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

double quantile(std::vector<double> values, double part) {
  if (values.empty()) {
    return 0;
  }
  std::sort(values.begin(), values.end());
  const auto last = static_cast<double>(values.size() - 1);
  return values[static_cast<size_t>(std::lround(part * last))];
}

}  // namespace kvm::bench::gpu
