// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/composition_page.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace kvm::testing {
namespace {

constexpr char kPage[] = "docs/policies/composition.md";

// Refusals by number, in the order in which they are met.
std::string number_refusals(std::string text, std::vector<std::string>* sentences) {
  const std::string begin = "refused{";
  for (size_t at = text.find(begin); at != std::string::npos; at = text.find(begin, at + 1)) {
    const size_t end = text.find('}', at);
    const std::string sentence = text.substr(at + begin.size(), end - at - begin.size());
    auto found = std::find(sentences->begin(), sentences->end(), sentence);
    if (found == sentences->end()) {
      found = sentences->insert(found, sentence);
    }
    text.replace(at, end + 1 - at, fmt::format("refused ({})", found - sentences->begin() + 1));
  }
  return text;
}

template <typename List>
auto& named(List* list, const std::string& name) {
  const auto found =
      std::find_if(list->begin(), list->end(), [&](const auto& item) { return item.name == name; });
  if (found != list->end()) {
    return *found;
  }
  list->emplace_back();
  list->back().name = name;
  return list->back();
}

// Two programs may write their sections at once.
class Lock {
 public:
  explicit Lock(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    EXPECT_EQ(::flock(fd_, LOCK_EX), 0) << path;
  }
  ~Lock() { ::close(fd_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  int fd_;
};

}  // namespace

void CompositionPage::add(const std::string& table, const std::string& row,
                          const std::string& column, const std::string& family,
                          const std::string& fact) {
  Table& in = named(&tables_, table);
  if (std::find(in.columns.begin(), in.columns.end(), column) == in.columns.end()) {
    in.columns.push_back(column);
  }
  Cell& cell = named(&in.rows, row).cells[column];
  const auto found = std::find_if(cell.begin(), cell.end(),
                                  [&](const auto& item) { return item.first == family; });
  if (found == cell.end()) {
    cell.emplace_back(family, fact);
  } else {
    EXPECT_EQ(fact, found->second)
        << row << ", " << column << ": a codec of the family " << family << " is not as the first";
  }
}

std::string CompositionPage::render(const Cell& cell) {
  std::vector<std::pair<std::string, std::string>> facts;  // fact, families
  for (const auto& [family, fact] : cell) {
    const auto found = std::find_if(facts.begin(), facts.end(), [&, &wanted = fact](const auto& f) {
      return f.first == wanted;
    });
    if (found == facts.end()) {
      facts.emplace_back(fact, family);
    } else {
      found->second += ", " + family;
    }
  }
  if (facts.size() == 1) {
    return facts[0].first;
  }
  std::string text;
  for (const auto& [fact, families] : facts) {
    text += fmt::format("{}{}: {}", text.empty() ? "" : "<br>", families, fact);
  }
  return text;
}

std::string CompositionPage::render() const {
  std::string text;
  std::vector<std::string> sentences;
  for (const Table& table : tables_) {
    text += fmt::format("\n### {}\n\n| policy |", table.name);
    for (const std::string& column : table.columns) {
      text += fmt::format(" {} |", column);
    }
    text += "\n|---|";
    for (size_t i = 0; i < table.columns.size(); ++i) {
      text += "---|";
    }
    text += "\n";
    for (const Row& row : table.rows) {
      text += fmt::format("| {} |", row.name);
      for (const std::string& column : table.columns) {
        const auto cell = row.cells.find(column);
        text += fmt::format(" {} |", cell == row.cells.end() ? "" : render(cell->second));
      }
      text += "\n";
    }
  }
  text = number_refusals(text, &sentences);
  if (!sentences.empty()) {
    text += "\nRefused with these words:\n\n";
    for (size_t i = 0; i < sentences.size(); ++i) {
      text += fmt::format("{}. {}\n", i + 1, sentences[i]);
    }
  }
  return text + "\n";
}

void CompositionPage::check() const {
  const char* const source = std::getenv("KVM_SOURCE_DIR");
  ASSERT_NE(source, nullptr) << "ctest says where the source is";
  const std::string path = std::string(source) + "/" + kPage;
  const Lock lock(path);
  std::ifstream file(path);
  std::string page(std::istreambuf_iterator<char>(file), {});
  const std::string begin = fmt::format("<!-- {}: generated -->\n", section_);
  const std::string end = fmt::format("<!-- {}: end -->\n", section_);
  const size_t from = page.find(begin);
  const size_t to = page.find(end);
  ASSERT_TRUE(from != std::string::npos && to != std::string::npos && from < to)
      << path << " lacks the marks of the section " << section_;
  const size_t first = from + begin.size();
  const std::string generated = render();
  const std::string there = page.substr(first, to - first);
  if (std::getenv("KVM_UPDATE") != nullptr) {
    page.replace(first, to - first, generated);
    std::ofstream out(path);
    out << page;
    ASSERT_TRUE(out.flush()) << path;
    return;
  }
  EXPECT_EQ(there, generated) << kPage << " is not what pairs answered. If they should, "
                              << "KVM_UPDATE=1 ./dev test -R composition writes it";
}

}  // namespace kvm::testing
