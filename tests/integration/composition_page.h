// SPDX-License-Identifier: Apache-2.0
// docs/policies/composition.md as a test finds it to be: tables of what pairs answered, between two
// marks of the page, and the sentences of what was refused.
#ifndef KVM_TESTS_INTEGRATION_COMPOSITION_PAGE_H_
#define KVM_TESTS_INTEGRATION_COMPOSITION_PAGE_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvm::testing {

// One section of the page. One thread.
class CompositionPage {
 public:
  // section: what the page's marks call it.
  explicit CompositionPage(std::string section) : section_(std::move(section)) {}

  // Tables, columns and rows stand in the order in which they are first named. A fact that differs
  // from what the family's first codec gave fails the test.
  void add(const std::string& table, const std::string& row, const std::string& column,
           const std::string& family, const std::string& fact);

  // Compares with the page in the tree, or with KVM_UPDATE writes it there; fails the test.
  void check() const;

 private:
  using Cell = std::vector<std::pair<std::string, std::string>>;  // family, fact
  struct Row {
    std::string name;
    std::map<std::string, Cell> cells;  // by column
  };
  struct Table {
    std::string name;
    std::vector<std::string> columns;
    std::vector<Row> rows;
  };

  std::string render() const;
  static std::string render(const Cell& cell);

  std::string section_;
  std::vector<Table> tables_;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_INTEGRATION_COMPOSITION_PAGE_H_
